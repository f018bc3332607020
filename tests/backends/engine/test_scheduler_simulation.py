"""Whatever the load, everyone gets the tokens they would get alone, and nothing leaks.

The fake model derives every token from the KV content that a plan's block tables address, so these tests see wrong
tables, wrong reuse and wrong recomputation.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.backends.engine.conftest import Simulation

    from enginehouse_backends.engine.scheduler import Scheduler
    from enginehouse_backends.engine.sequence import Sequence

POLICIES = ("guaranteed_no_evict", "max_utilization")


def random_limits(rng: random.Random) -> dict[str, Any]:
    """Return tiny limits under which a prompt may be half of the longest sequence."""
    tokens_per_block, num_blocks = rng.choice((1, 2, 4, 8)), rng.randint(4, 24)
    max_seq_len = min(num_blocks * tokens_per_block + 1, 60)
    enable_chunked_context = rng.random() < 0.6
    return {
        "num_blocks": num_blocks,
        "tokens_per_block": tokens_per_block,
        "enable_reuse": rng.random() < 0.7,
        "max_num_tokens": rng.randint(1, 24) if enable_chunked_context else rng.randint(max_seq_len // 2, max_seq_len),
        "max_batch_size": rng.randint(1, 8),
        "max_seq_len": max_seq_len,
        "enable_chunked_context": enable_chunked_context,
    }


@pytest.fixture
def random_arrivals(
    create_sequence: Callable[..., Sequence], create_siblings: Callable[..., list[Sequence]]
) -> Callable[[random.Random, int], list[Sequence]]:
    """Make a dozen sequences that fit: half of them share prefixes, some have siblings, priorities, context logits."""

    def arrivals(rng: random.Random, max_seq_len: int) -> list[Sequence]:
        sequences: list[Sequence] = []
        while len(sequences) < 12:
            sequence = create_sequence(
                len(sequences),
                num_prompt_tokens=rng.randint(1, max_seq_len // 2),
                max_new_tokens=rng.randint(1, max_seq_len // 2),
                first_token=rng.choice((0, None)),
                num_return_sequences=rng.choice((1, 1, 1, 3)),
                priority=rng.choice((0, 0, 0, 1, 2)),
                return_context_logits=rng.random() < 0.1,
                end_id=rng.choice((None, 7)),
            )
            sequences += create_siblings(sequence)
        return sequences

    return arrivals


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    "first_seed", [0, 50, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(100, 500, 50))]
)
def test_random_schedules_finish_and_leak_nothing(
    create_scheduler: Callable[..., Scheduler],
    random_arrivals: Callable[[random.Random, int], list[Sequence]],
    simulate: type[Simulation],
    policy: str,
    first_seed: int,
) -> None:
    """Random arrivals, cancels and drafts over tiny pools: all end, and each output is what the model says alone."""
    for seed in range(first_seed, first_seed + 50):
        rng = random.Random(seed)
        limits = random_limits(rng)
        scheduler = create_scheduler(policy=policy, **limits)
        simulation = simulate(scheduler, rng, draft_chance=rng.choice((0.0, 0.5, 0.9)))
        arrivals = random_arrivals(rng, limits["max_seq_len"])
        cancelled = set()
        while arrivals:
            if rng.random() < 0.4:
                simulation.add(arrivals.pop(0))
            simulation.step()
            if scheduler.has_work and rng.random() < 0.05:
                cancelled.add(rng.choice(sorted(scheduler._sequences)))
                scheduler.finish(max(cancelled & scheduler._sequences.keys()))
                scheduler.audit()
        simulation.run()

        for sequence_id, sequence in simulation.sequences.items():
            expected, output = simulation.expected_output(sequence_id), simulation.output(sequence_id)
            assert expected[: len(output)] == output, f"seed {seed}, sequence {sequence_id}"
            if sequence_id not in cancelled:
                assert len(expected) == len(output)
                if sequence.request.return_context_logits:
                    assert simulation.num_context_rows[sequence_id] == sequence.num_prompt_tokens
        assert_token_classes_add_up(simulation)


def assert_token_classes_add_up(simulation: Simulation) -> None:
    """Every token that a step computed belongs to exactly one class of its sequence's counts."""
    num_planned: Counter[int] = Counter()
    for plan in simulation.plans:
        for piece in plan.slices:
            num_planned[piece.sequence_id] += len(piece.token_ids)
    for sequence_id, sequence in simulation.sequences.items():
        stats = sequence.stats()
        num_counted = sequence.peak_computed_tokens - stats.num_cached_prompt_tokens + stats.num_recomputed_tokens
        num_rejected = stats.num_draft_tokens - stats.num_accepted_draft_tokens

        assert num_planned[sequence_id] == num_counted + num_rejected


BASE = {"num_blocks": 200, "max_num_tokens": 300, "max_batch_size": 8, "enable_reuse": False}


@pytest.mark.parametrize(
    ("changes", "draft_chance", "happened"),
    [
        ({"max_batch_size": 1}, 0.0, "alone"),
        ({"max_num_tokens": 9}, 0.0, "chunked"),
        ({"enable_reuse": True, "max_batch_size": 2}, 0.0, "reused"),
        ({"policy": "max_utilization", "num_blocks": 24}, 0.0, "paused"),
        ({"policy": "max_utilization", "num_blocks": 24, "enable_reuse": True, "max_num_tokens": 9}, 0.5, "paused"),
        ({}, 0.8, "drafted"),
    ],
)
def test_how_a_sequence_is_served_does_not_change_its_tokens(
    create_scheduler: Callable[..., Scheduler],
    create_sequence: Callable[..., Sequence],
    simulate: type[Simulation],
    changes: dict[str, Any],
    draft_chance: float,
    happened: str,
) -> None:
    """Alone or batched, chunked or whole, reused or computed, paused or not, drafted or not: the same outputs."""

    def serve(limits: dict[str, Any], draft_chance: float) -> tuple[Simulation, list[list[int]]]:
        simulation = simulate(create_scheduler(**limits), draft_chance=draft_chance)
        simulation.add(*(create_sequence(i, 12 + i, 24, first_token=i % 2) for i in range(8)))
        return simulation, simulation.run()

    _, expected = serve(BASE, 0.0)
    simulation, outputs = serve(BASE | changes, draft_chance)
    stats = [sequence.stats() for sequence in simulation.sequences.values()]
    witnesses = {
        "alone": max(len(plan.slices) for plan in simulation.plans) == 1,
        "chunked": any(
            piece.num_past_tokens and not piece.num_logit_rows for p in simulation.plans for piece in p.slices
        ),
        "reused": sum(s.num_cached_prompt_tokens for s in stats) > 40,
        "paused": sum(s.num_preemptions for s in stats) >= 3,
        "drafted": sum(s.num_accepted_draft_tokens for s in stats) > 20,
    }

    assert witnesses[happened]
    assert expected == outputs
