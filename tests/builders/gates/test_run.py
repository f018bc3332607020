"""The sequence of gates over builds without a server: what passes, what is caught, what is skipped and why."""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal
from typing import TYPE_CHECKING

import numpy as np
import pytest
from tests.support.bigram_builds import BigramTools, ByteEncoder, make_table, write_bigram_build

from enginehouse_builders.gates.prompts import Prompt
from enginehouse_builders.gates.run import GateOptions, GateRun
from enginehouse_builders.gates.speed import Trace
from enginehouse_builders.spec.model import CostGate, Costs, Gates, SpeedGate
from enginehouse_builders.store import StoredBuild
from enginehouse_contract.errors import (
    BuildIntegrityError,
    ConfigurationError,
    EngineFailureError,
    ServerStartError,
    ServerUnreachableError,
)

if TYPE_CHECKING:
    from pathlib import Path

    from enginehouse_builders.gates import GateRecord

ANY_SPEED = SpeedGate(min_throughput_ratio=0.001, max_ttft_ratio=1000, max_itl_ratio=1000)
OPTIONS = GateOptions(
    thresholds=Gates(speed=ANY_SPEED, cost=CostGate(max_ratio=1000)),
    costs=Costs(machine_hour=Decimal(2)),
    trace=Trace(num_requests=2, num_prompt_tokens=12, num_output_tokens=4, concurrency=2, num_pairs=3),
)


@pytest.fixture
def good(tmp_path: Path) -> StoredBuild:
    """The reference."""
    return write_bigram_build(tmp_path, "good")


@pytest.fixture
def close(tmp_path: Path) -> StoredBuild:
    """A build that says nearly the same."""
    return write_bigram_build(tmp_path, "close")


@pytest.fixture
def tools() -> BigramTools:
    """Engines of both builds; more are added by name."""
    table = make_table()
    noise = np.random.default_rng(1).normal(size=table.shape).astype(np.float32) * np.float32(0.02)
    return BigramTools({"good": table, "close": table + noise})


def _result(record: GateRecord, gate: str) -> tuple[str, str]:
    found = next(result for result in record.results if result.gate == gate)
    return found.status, found.reason


def test_a_good_build_passes_every_gate(good: StoredBuild, close: StoredBuild, tools: BigramTools) -> None:
    """With the numbers of each gate, beside its thresholds."""
    record = GateRun(tools, close, good, OPTIONS).run()
    assert record.passed, record.why_not
    numbers = {result.gate: result.numbers for result in record.results}
    assert numbers["memory"]["weights_bytes"] == numbers["integrity"]["num_bytes"]
    assert numbers["numeric"]["token_agreement"] > 0.9
    assert 0 < numbers["numeric"]["mean_kl_divergence"] < 0.01
    assert numbers["speed"]["num_rounds"] == 3
    assert Decimal(str(numbers["cost"]["cost_per_million_output_tokens"])) > 0
    assert record.against_build_id == good.manifest.build_id
    assert tools.events == ["+close", "+good", "-close", "-good"]


def test_without_a_reference_only_what_needs_none_is_checked(good: StoredBuild, tools: BigramTools) -> None:
    """It passes, and the reasons say what was not compared."""
    record = GateRun(tools, good, None, OPTIONS).run()
    assert record.passed, record.why_not
    assert "no reference" in _result(record, "numeric")[1]
    assert _result(record, "cost")[0] == "skipped"


def test_scrambled_numbers_are_caught(good: StoredBuild, tools: BigramTools, tmp_path: Path) -> None:
    """A build that answers something else fails the numeric gate, and what follows is skipped."""
    broken = write_bigram_build(tmp_path, "broken")
    tools.tables["broken"] = np.random.default_rng(2).permuted(tools.tables["good"], axis=1)
    record = GateRun(tools, broken, good, OPTIONS).run()
    status, reason = _result(record, "numeric")
    assert status == "failed"
    assert all(word in reason for word in ("tokens agree", "KL divergence"))
    assert _result(record, "speed") == ("skipped", "the numeric gate failed before it")
    assert record.why_not.startswith("the numeric gate failed")


def test_a_build_alone_must_predict_text_better_than_guessing(tools: BigramTools, tmp_path: Path) -> None:
    """Without a reference, garbage is still told from language: its perplexity is beyond the vocabulary's size."""
    garbage = write_bigram_build(tmp_path, "garbage")
    tools.tables["garbage"] = make_table() * 20
    status, reason = _result(GateRun(tools, garbage, None, OPTIONS).run(), "numeric")
    assert status == "failed"
    assert "worse than guessing" in reason


@pytest.mark.parametrize("against", [True, False])
def test_one_nan_is_caught(good: StoredBuild, close: StoredBuild, tools: BigramTools, *, against: bool) -> None:
    """With the prompt and the position where it came."""
    tools.tables["close"][ord("e"), 3] = np.nan
    record = GateRun(tools, close, good if against else None, OPTIONS).run()
    status, reason = _result(record, "numeric")
    assert status == "failed"
    assert "NaN" in reason
    assert "shipped:1" in reason


def test_builds_that_cannot_be_compared_say_why(good: StoredBuild, close: StoredBuild, tools: BigramTools) -> None:
    """Vocabularies of two sizes, and a reference that is itself broken, which is not blamed on the build."""
    small = tools.tables["close"][:, :290]
    tools.tables["close"] = small
    assert "290 tokens, the reference's 300" in GateRun(tools, close, good, OPTIONS).run().why_not
    tools.tables["good"][:, 7] = np.nan
    assert "logits of the reference are NaN" in GateRun(tools, close, good, OPTIONS).run().why_not


def test_own_prompts_must_pass_too(good: StoredBuild, close: StoredBuild, tools: BigramTools) -> None:
    """A build that fails only on the user's own prompts fails, and the reason says on which set."""
    special = [token for token in range(256) if chr(token) in "\x01\x02\x03"]
    tools.tables["close"][special] = tools.tables["close"][special][:, ::-1]
    own = (Prompt("mine:1", text="\x01\x02\x03" * 40),)
    passed = GateRun(tools, close, good, OPTIONS).run()
    failed = GateRun(tools, close, good, replace(OPTIONS, own_prompts=own)).run()
    assert passed.passed
    status, reason = _result(failed, "numeric")
    assert status == "failed"
    assert "own prompts" in reason
    assert "shipped prompts" not in reason


def test_prompts_that_say_nothing_are_the_callers_mistake(good: StoredBuild, tools: BigramTools) -> None:
    """A set of which nothing can be asked is refused, and no record blames the build."""
    own = (Prompt("mine:1", text="a"),)
    with pytest.raises(ConfigurationError, match="own prompts hold none"):
        GateRun(tools, good, None, replace(OPTIONS, own_prompts=own)).run()


def test_another_tokenizer_is_caught(good: StoredBuild, close: StoredBuild, tools: BigramTools) -> None:
    """Where digests differ the tokenizers are tried; equal behaviour passes, other tokens fail, and so do templates."""
    renamed = StoredBuild(close.build_dir, replace(close.manifest, tokenizer_sha256="1" * 64))
    assert GateRun(tools, renamed, good, OPTIONS).run().passed
    tools.encoders["close"] = ByteEncoder(offset=1)
    assert "tokenizers differ" in _result(GateRun(tools, renamed, good, OPTIONS).run(), "numeric")[1]
    tools.encoders["close"] = ByteEncoder(has_template=False)
    other = StoredBuild(close.build_dir, replace(close.manifest, chat_template_sha256="1" * 64))
    assert "templates differ" in _result(GateRun(tools, other, good, OPTIONS).run(), "numeric")[1]


def test_engines_without_logits_are_judged_by_their_tokens(
    good: StoredBuild, close: StoredBuild, tools: BigramTools, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same agreement as with logits; what could not be compared is said, and alone there is nothing to judge by."""
    with_logits = GateRun(tools, close, good, OPTIONS).run()
    monkeypatch.setattr("enginehouse_builders.gates.run.gives_logits", lambda _manifest, _config: False)
    record = GateRun(tools, close, good, OPTIONS).run()
    assert record.passed, record.why_not
    assert record.results[4].numbers["token_agreement"] == with_logits.results[4].numbers["token_agreement"]
    assert "not compared" in _result(record, "numeric")[1]
    broken = write_bigram_build(tmp_path, "broken")
    tools.tables["broken"] = np.random.default_rng(2).permuted(tools.tables["good"], axis=1)
    assert "tokens agree in" in GateRun(tools, broken, good, OPTIONS).run().why_not
    assert not GateRun(tools, close, None, OPTIONS).run().passed


def test_a_changed_file_fails_integrity_and_nothing_is_loaded(good: StoredBuild, tools: BigramTools) -> None:
    """The file is named; the build is never given to a server."""
    (good.build_dir / "weights.bin").write_bytes(b"goof")
    record = GateRun(tools, good, None, OPTIONS).run()
    assert _result(record, "integrity")[0] == "failed"
    assert "weights.bin" in record.why_not
    assert {result.status for result in record.results[1:]} == {"skipped"}
    assert not tools.events


def test_a_build_too_large_for_the_host_says_what_it_needs(tools: BigramTools, tmp_path: Path) -> None:
    """Bytes of weights, activations and KV, and what is available."""
    huge = write_bigram_build(tmp_path, "huge", head_size=1 << 34)
    status, reason = _result(GateRun(tools, huge, None, OPTIONS).run(), "memory")
    assert status == "failed"
    assert "does not fit" in reason


def test_builds_that_do_not_fit_together_are_loaded_in_turn(
    good: StoredBuild, tools: BigramTools, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With room for one, no two are ever loaded at once, and the comparison is the same."""
    close = write_bigram_build(tmp_path, "close")
    together = GateRun(tools, close, good, OPTIONS).run()
    tools.events.clear()
    room_for_one = int(together.results[2].numbers["least_bytes"] * 1.5)
    monkeypatch.setattr("enginehouse_builders.gates.memory.available_bytes", lambda _host, **_: room_for_one)
    in_turn = GateRun(tools, close, good, OPTIONS).run()
    assert in_turn.passed, in_turn.why_not
    assert all(
        one[0] == "+" and two == "-" + one[1:] for one, two in zip(tools.events[::2], tools.events[1::2], strict=True)
    )
    assert in_turn.results[4].numbers == together.results[4].numbers


def test_a_build_that_does_not_load_says_so_in_the_servers_words(good: StoredBuild, tools: BigramTools) -> None:
    """The load gate fails with the server's message."""
    tools.load_errors["good"] = ServerStartError("tritonserver ended: model `tensorrt_llm`: no such operator.")
    record = GateRun(tools, good, None, OPTIONS).run()
    assert _result(record, "load") == ("failed", "tritonserver ended: model `tensorrt_llm`: no such operator")


def test_a_server_that_serves_another_build_is_caught(good: StoredBuild, tools: BigramTools) -> None:
    """The build id is read back."""
    tools.served_ids["good"] = "sha256:other"
    assert "another build" in _result(GateRun(tools, good, None, OPTIONS).run(), "load")[1]


def test_a_server_that_is_gone_says_nothing_about_the_build(good: StoredBuild, tools: BigramTools) -> None:
    """No record comes of it."""
    tools.load_errors["good"] = ServerUnreachableError("nobody answers")
    with pytest.raises(ServerUnreachableError):
        GateRun(tools, good, None, OPTIONS).run()


def test_a_reference_that_cannot_be_one_is_refused(good: StoredBuild, close: StoredBuild, tools: BigramTools) -> None:
    """A damaged reference, and one that this host cannot load, are the caller's mistakes."""
    foreign = StoredBuild(close.build_dir, replace(close.manifest, target="tensorrt_llm"))
    with pytest.raises(ConfigurationError, match="does not load here"):
        GateRun(tools, good, foreign, OPTIONS).run()
    (close.build_dir / "weights.bin").unlink()
    with pytest.raises(BuildIntegrityError, match=r"the reference .*weights\.bin"):
        GateRun(tools, good, close, OPTIONS).run()


def test_a_reference_that_fails_while_compared_is_named(
    good: StoredBuild, close: StoredBuild, tools: BigramTools
) -> None:
    """A failure of the reference is not blamed on the build."""
    tools.load_errors["good"] = EngineFailureError("out of memory")
    assert _result(GateRun(tools, close, good, OPTIONS).run(), "numeric") == ("failed", "the reference: out of memory")
