"""Speculation in rounds over engine calls: the target's own continuation comes, and every round is counted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from enginehouse_backends.front_door.draft_target import Draft, NgramSource, generate_with_drafts
from enginehouse_backends.front_door.engine_client import EngineDelta, prompt_inputs

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

END_ID = 99


def next_token(context: list[int]) -> int:
    """A deterministic language: mostly a cycle of seven, with an end after 40 tokens."""
    if len(context) >= 44:
        return END_ID
    return (context[-1] * 3 + len(context) // 9) % 7


class TargetEngine:
    """Verifies drafts as the contract says: the accepted ones and one more, at most request_output_len."""

    def __init__(self) -> None:
        self.num_calls = 0
        self.seeds: list[int] = []

    def __call__(
        self, model_name: str, inputs: Mapping[str, Any], outputs: Any, *, request_id: str, parameters: Any = None
    ) -> Iterator[dict[str, Any]]:
        self.num_calls += 1
        if "seed" in inputs:
            self.seeds.append(int(inputs["seed"][0, 0]))
        context = inputs["input_ids"][0].tolist()
        drafts = inputs["draft_input_ids"][0].tolist() if "draft_input_ids" in inputs else []
        limit = int(inputs["request_output_len"][0, 0])
        new: list[int] = []
        for draft in [*drafts, None][:limit]:
            new.append(next_token(context + new))
            if new[-1] == END_ID or new[-1] != draft:
                break
        num_accepted = sum(a == b for a, b in zip(drafts, new, strict=False))
        yield {
            "output_ids": np.array([[new]], np.int32),
            "sequence_length": np.array([[len(new)]], np.int32),
            "cum_log_probs": np.array([[-1.0]], np.float32),
            "total_draft_tokens": np.array([[len(drafts)]], np.int32),
            "total_accepted_draft_tokens": np.array([[num_accepted]], np.int32),
            "kv_cache_reused_blocks": np.array([[self.num_calls]], np.int32),
            "last_token_time_ns": np.array([[1000 * self.num_calls]], np.int64),
        }


class PerfectSource:
    """Drafts what the target will say, with a wrong token now and then."""

    def draft(self, context: list[int], max_tokens: int) -> Draft:
        tokens: list[int] = []
        for _ in range(max_tokens):
            tokens.append(next_token(context + tokens))
        if len(context) % 3 == 0 and tokens:
            tokens[-1] = 55
        return Draft(tuple(tokens))


def run(engine: TargetEngine, source: Any, **options: Any) -> list[EngineDelta]:
    """Generate in rounds after the prompt 1 2 3 4."""
    inputs = {**prompt_inputs([1, 2, 3, 4], 100), **options.pop("inputs", {})}
    arguments = {"max_tokens": 30, "num_draft_tokens": 4, "end_id": END_ID, **options}
    return list(generate_with_drafts(engine, "target", inputs, source, request_id="r", parameters={}, **arguments))


def plain(max_tokens: int) -> list[int]:
    """Continue the prompt 1 2 3 4 token by token."""
    context = [1, 2, 3, 4]
    while len(context) < 4 + max_tokens and context[-1] != END_ID:
        context.append(next_token(context))
    return context[4:]


@pytest.mark.parametrize("max_tokens", [1, 2, 7, 30, 60])
@pytest.mark.parametrize("source", [PerfectSource(), NgramSource()], ids=["perfect", "ngram"])
def test_rounds_give_what_the_target_gives_alone(source: Any, max_tokens: int) -> None:
    """Joined rounds are the plain continuation, up to the limit or the end."""
    source = type(source)()
    deltas = run(TargetEngine(), source, max_tokens=max_tokens)

    assert [token for delta in deltas for token in delta.token_ids] == plain(max_tokens)


def test_drafts_save_calls_and_all_rounds_are_counted() -> None:
    """Fewer calls than tokens are made; the last delta has the sums over rounds and the first round's reuse."""
    engine = TargetEngine()
    deltas = run(engine, PerfectSource())
    metrics = deltas[-1].metrics

    assert engine.num_calls == len(deltas) < 12
    assert all(delta.metrics is None for delta in deltas[:-1])
    assert metrics is not None
    assert int(metrics["total_draft_tokens"][0, 0]) > 20
    assert 0.5 < float(metrics["acceptance_rate"][0, 0]) < 1.0
    assert int(metrics["kv_cache_reused_blocks"][0, 0]) == 1
    assert int(metrics["last_token_time_ns"][0, 0]) == 1000 * engine.num_calls
    assert deltas[-1].cum_log_prob == -1.0 * engine.num_calls


def test_each_round_has_a_seed_of_its_own() -> None:
    """A request's seed gives every round another, and the same ones again."""
    engines = TargetEngine(), TargetEngine()
    for engine in engines:
        run(engine, NgramSource(), inputs={"seed": np.array([[7]], np.uint64)})

    assert len(set(engines[0].seeds)) == len(engines[0].seeds) > 3
    assert engines[0].seeds == engines[1].seeds


def test_rounds_end_when_nobody_wants_them() -> None:
    """Between rounds a cancelled request stops, with the metrics so far."""
    answers = iter([True, True, False])
    deltas = run(TargetEngine(), NgramSource(), is_wanted=lambda: next(answers))

    assert len(deltas) == 3
    assert deltas[-1].metrics is not None
