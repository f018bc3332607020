# The two commands: `make demo` (build, serve, ask) and `make test`. Everything else is for developers.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export ENGINEHOUSE_HOME ?= $(CURDIR)/.enginehouse

.PHONY: help venv demo test test-fast lint format docs bench-build bench-engine bench-speculation bench-frontdoor bench-promotion bench-accounting faults clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

# tritonserver comes inside the wheel nvidia-pytriton; its Python dependencies are not needed, so it is installed alone.
$(VENV)/.installed: pyproject.toml constraints.txt requirements-server.txt
	@echo "==> installing pinned packages into $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --upgrade pip
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@$(BIN)/python -m pip install --quiet --no-deps --requirement requirements-server.txt
	@touch $@

venv: $(VENV)/.installed ## create .venv with pinned packages

demo: venv ## build a small model, start a real server, ask it over gRPC and HTTP
	@$(BIN)/enginehouse demo

test: lint ## lint, types, and every test
	@echo "==> tests"
	@$(BIN)/python -m pytest

test-fast: venv ## the tests that need neither model nor server: under a minute
	@$(BIN)/python -m pytest -m "not slow and not integration and not model"

lint: venv ## ruff and mypy
	@echo "==> ruff"
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --quiet --check .
	@echo "==> mypy"
	@$(BIN)/mypy

format: venv ## format the code
	@$(BIN)/ruff check --quiet --fix-only .
	@$(BIN)/ruff format --quiet .

bench-accounting: venv ## what accounting costs: beside a server without it, and the ledger alone over a million records
	@$(BIN)/python tests/benchmarks/bench_accounting.py

faults: venv ## kill servers and metering processes at random, at length, and audit the books
	@$(BIN)/python -m tests.support.server_faults

docs: venv ## regenerate the model repository's configs and docs/contract.md
	@$(BIN)/python -m enginehouse_contract.render .
	@$(BIN)/ruff format --quiet model_repository

bench-build: venv ## seconds of a build, a cache hit and a plan, and the peak memory of a build
	@$(BIN)/python tests/benchmarks/bench_build.py

bench-engine: venv ## our engine beside OpenVINO GenAI (and llama.cpp where installed); one JSON object last
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[bench]'
	@$(BIN)/python tests/benchmarks/bench_engine.py

bench-speculation: venv ## what prompt-lookup drafts are worth, by batch size
	@$(BIN)/python tests/benchmarks/bench_speculation.py

bench-frontdoor: venv ## what the front door costs, over the real engine and over an instant one
	@$(BIN)/python tests/benchmarks/bench_frontdoor.py

bench-promotion: venv ## promotions and rollbacks under a steady load: what fails, mixes, is lost, and how long a flip takes
	@$(BIN)/python tests/benchmarks/bench_promotion.py

clean: ## delete the virtual environment and all state of this checkout
	@rm -rf $(VENV) .enginehouse
