"""The engine against transformers: greedy tokens of a lossless build, however the steps are cut."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.support.engines import generate_all, load_runner, make_request, running_engine

from enginehouse_backends.engine.request import SamplingParams

if TYPE_CHECKING:
    from enginehouse_backends.engine.runner import OpenVinoRunner

pytestmark = [pytest.mark.model, pytest.mark.slow]

REFERENCE: dict[str, Any] = json.loads((Path(__file__).parents[2] / "data" / "reference_greedy.json").read_text())
RECORDS: list[dict[str, Any]] = REFERENCE["records"]
CLOSE_CALL = 1e-3  # between the two largest logits: float32 sums in another order may decide it either way


def assert_follows(record: dict[str, Any], token_ids: tuple[int, ...]) -> None:
    """Compare with a record up to a close call, after which both continuations are as good."""
    for position, (expected, found, gap) in enumerate(
        zip(record["token_ids"], token_ids, record["gaps"], strict=False)
    ):
        if expected != found:
            assert gap < CLOSE_CALL, f"token {position} of {record['prompt']!r} is {found}, not {expected}"
            return


@pytest.fixture(scope="module")
def runner(smollm2_f32_build: Path) -> OpenVinoRunner:
    """The lossless build, compiled once."""
    return load_runner(smollm2_f32_build)


def requests_of(records: list[dict[str, Any]], num_tokens: int = 64) -> list[Any]:
    """Return greedy requests for the prompts of *records*."""
    return [make_request(f"r{index}", record["prompt_ids"], num_tokens) for index, record in enumerate(records)]


def test_the_reference_covers_enough() -> None:
    """At least 20 prompts of 64 tokens each are recorded."""
    assert len(RECORDS) >= 20
    assert all(len(record["token_ids"]) == 64 for record in RECORDS)


def test_greedy_tokens_in_one_batch_are_those_of_transformers(runner: OpenVinoRunner, smollm2_f32_build: Path) -> None:
    """All prompts batched in flight give the recorded tokens."""
    with running_engine(runner, smollm2_f32_build) as engine:
        outputs = generate_all(engine, requests_of(RECORDS))

    for record, (output,) in zip(RECORDS, outputs, strict=True):
        assert len(output.token_ids) == 64
        assert_follows(record, output.token_ids)


@pytest.mark.parametrize("index", [0, 3, 10, 20])
def test_a_prompt_alone_gives_the_same(runner: OpenVinoRunner, smollm2_f32_build: Path, index: int) -> None:
    """One prompt by itself gives the recorded tokens."""
    with running_engine(runner, smollm2_f32_build) as engine:
        ((output,),) = generate_all(engine, requests_of([RECORDS[index]], 32))

    assert_follows(RECORDS[index], output.token_ids)


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_tokens": 16},
        {"enable_kv_cache_reuse": False},
        {"policy": "max_utilization"},
        {"speculate_ngram": True},
    ],
    ids=["chunked", "no reuse", "max_utilization", "drafted"],
)
def test_how_steps_are_cut_changes_nothing(
    runner: OpenVinoRunner, smollm2_f32_build: Path, options: dict[str, Any]
) -> None:
    """Chunks, reuse, the policy and drafts leave greedy tokens as they are."""
    records = [RECORDS[index] for index in (0, 2, 5, 12, 20)]
    with running_engine(runner, smollm2_f32_build, **options) as engine:
        outputs = generate_all(engine, requests_of(records, 32))
        again = generate_all(engine, requests_of(records, 32))

    for record, (output,), (second,) in zip(records, outputs, again, strict=True):
        assert_follows(record, output.token_ids)
        assert_follows(record, second.token_ids)


def test_a_paused_sequence_goes_on_as_if_nothing_happened(smollm2_f32_build: Path) -> None:
    """With too few blocks for all, sequences are paused and computed again, and their tokens are the recorded ones."""
    runner = load_runner(smollm2_f32_build, num_kv_tokens=12 * 32)
    records = [RECORDS[index] for index in (0, 1, 2, 3, 5, 6)]
    options = {"policy": "max_utilization", "enable_kv_cache_reuse": False, "max_seq_len": 300}
    with running_engine(runner, smollm2_f32_build, **options) as engine:
        outputs = generate_all(engine, requests_of(records, 64))

    assert sum(output.stats.num_preemptions for (output,) in outputs) > 0
    assert sum(output.stats.num_recomputed_tokens for (output,) in outputs) > 0
    for record, (output,) in zip(records, outputs, strict=True):
        assert_follows(record, output.token_ids)


def test_sampled_text_is_the_same_alone_batched_and_drafted(runner: OpenVinoRunner, smollm2_f32_build: Path) -> None:
    """A seed gives one text, whatever shares the steps and whether drafts are verified."""
    sampling = SamplingParams(top_k=40, temperature=0.9, seed=11)
    request = make_request("sampled", RECORDS[5]["prompt_ids"], 40, sampling=sampling)
    with running_engine(runner, smollm2_f32_build) as engine:
        ((alone,),) = generate_all(engine, [request])
        ((batched,), *_) = generate_all(engine, [request, *requests_of(RECORDS[:6], 40)])
    with running_engine(runner, smollm2_f32_build, speculate_ngram=True) as engine:
        ((drafted,),) = generate_all(engine, [request])

    assert alone.token_ids == batched.token_ids == drafted.token_ids


def test_log_probs_are_those_of_transformers(runner: OpenVinoRunner, smollm2_f32_build: Path) -> None:
    """Reported log probabilities agree with the recorded ones."""
    request = make_request("log probs", RECORDS[0]["prompt_ids"], 16, return_log_probs=True)
    with running_engine(runner, smollm2_f32_build) as engine:
        ((output,),) = generate_all(engine, [request])

    assert output.log_probs == pytest.approx(RECORDS[0]["log_probs"][:16], abs=2e-3)
