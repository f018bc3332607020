"""The planner's rules, one by one, on plans small enough to write out."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from enginehouse_backends.engine.request import SequenceId
from enginehouse_backends.engine.scheduler import IterationStats, SchedulerConfig
from enginehouse_backends.engine.sequence import Sequence, SequenceStatus
from enginehouse_contract.errors import ConfigurationError, InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.backends.engine.conftest import Simulation

    from enginehouse_backends.engine.scheduler import Scheduler
    from enginehouse_backends.engine.step import StepPlan

    CreateScheduler = Callable[..., Scheduler]
    CreateSequence = Callable[..., Sequence]
    CreateSiblings = Callable[..., list[Sequence]]

FIRST, SECOND, THIRD = SequenceId(0), SequenceId(1), SequenceId(2)


def lengths(plan: StepPlan | None) -> dict[int, int]:
    """Return how many tokens each sequence computes, in plan order."""
    return {piece.sequence_id: len(piece.token_ids) for piece in plan.slices} if plan else {}


def rows(plan: StepPlan | None) -> dict[int, int]:
    """Return how many rows of logits each sequence wants."""
    return {piece.sequence_id: piece.num_logit_rows for piece in plan.slices} if plan else {}


# ---- what a step holds ----


def test_nothing_to_do_is_none(create_scheduler: CreateScheduler) -> None:
    """Without sequences there is no plan and no work."""
    scheduler = create_scheduler()

    assert scheduler.schedule() is None
    assert not scheduler.has_work


def test_a_life_step_by_step(create_scheduler: CreateScheduler, create_sequence: CreateSequence) -> None:
    """A prompt of 6 in blocks of 4: two blocks, then a token a step, a third block for position 8, then all is free."""
    scheduler = create_scheduler(num_blocks=4)
    sequence = create_sequence(0, 6, max_new_tokens=4)
    scheduler.add(sequence)

    plan = scheduler.schedule()
    assert plan is not None
    (piece,) = plan.slices
    assert piece.token_ids == sequence.request.prompt_token_ids
    assert (piece.num_past_tokens, piece.block_ids, piece.num_logit_rows) == (0, (0, 1), 1)
    scheduler.apply(plan, {FIRST: (7,)})
    for past, token, block_ids in ((6, 7, (0, 1)), (7, 8, (0, 1)), (8, 9, (0, 1, 2))):
        plan = scheduler.schedule()
        assert plan is not None
        (piece,) = plan.slices
        assert (piece.num_past_tokens, piece.token_ids, piece.block_ids) == (past, (token,), block_ids)
        scheduler.apply(plan, {FIRST: (token + 1,)})
        scheduler.audit()

    finished = scheduler.finish(FIRST)
    assert finished is sequence
    assert finished.status is SequenceStatus.FINISHED
    assert finished.token_ids[6:] == [7, 8, 9, 10]
    assert not scheduler.has_work
    assert scheduler._tables.pool.num_used_blocks == 0
    assert scheduler._tables.pool.num_cached_blocks == 2
    scheduler.audit()


def test_the_budget_goes_to_generating_sequences_then_to_prompts_in_order(
    create_scheduler: CreateScheduler, create_sequence: CreateSequence, simulate: type[Simulation]
) -> None:
    """With 10 tokens a step, prompts of 6 and 12 fill three steps around the tokens being generated."""
    simulation = simulate(create_scheduler(max_num_tokens=10))
    simulation.add(create_sequence(0, 6), create_sequence(1, 12), create_sequence(2, 3))

    assert lengths(simulation.step()) == {0: 6, 1: 4}
    plan = simulation.step()
    assert lengths(plan) == {0: 1, 1: 8, 2: 1}
    assert rows(plan) == {0: 1, 1: 1, 2: 0}
    assert lengths(simulation.step()) == {0: 1, 1: 1, 2: 2}


def test_without_chunks_a_prompt_waits_until_it_fits_whole(
    create_scheduler: CreateScheduler, create_sequence: CreateSequence, simulate: type[Simulation]
) -> None:
    """A prompt as long as the budget starts only once nobody generates; the small one behind it does not overtake."""
    simulation = simulate(create_scheduler(max_num_tokens=8, enable_chunked_context=False))
    simulation.add(create_sequence(0, 2, max_new_tokens=3), create_sequence(1, 8), create_sequence(2, 1))

    assert [lengths(simulation.step()) for _ in range(5)] == [{0: 2}, {0: 1}, {0: 1}, {1: 8}, {1: 1, 2: 1}]


def test_drafts_ride_behind_the_token_and_never_past_the_last_one(
    create_scheduler: CreateScheduler, create_sequence: CreateSequence
) -> None:
    """Of 5 drafts with 4 tokens to go 3 are taken; 1 accepted draft and one more token make 2 new tokens."""
    scheduler = create_scheduler()
    sequence = create_sequence(0, 6, max_new_tokens=5)
    scheduler.add(sequence)
    plan = scheduler.schedule()
    assert plan is not None
    scheduler.apply(plan, {FIRST: (1,)})
    sequence.draft_token_ids = (2, 3, 4, 5, 6)

    plan = scheduler.schedule()
    assert plan is not None
    (piece,) = plan.slices
    assert (piece.token_ids, piece.num_logit_rows, sequence.draft_token_ids) == ((1, 2, 3, 4), 4, (2, 3, 4))
    scheduler.apply(plan, {FIRST: (2, 9)})
    stats = sequence.stats()
    assert (stats.num_output_tokens, stats.num_draft_tokens, stats.num_accepted_draft_tokens) == (3, 3, 1)
    assert (sequence.num_computed_tokens, sequence.num_uncomputed_tokens, sequence.draft_token_ids) == (8, 1, ())


def test_drafts_get_what_the_budget_leaves(create_scheduler: CreateScheduler, create_sequence: CreateSequence) -> None:
    """Every generating sequence gets its token before any gets drafts."""
    scheduler = create_scheduler(max_num_tokens=4)
    sequences = [create_sequence(i, 1, max_new_tokens=9) for i in range(2)]
    for sequence in sequences:
        scheduler.add(sequence)
    plan = scheduler.schedule()
    assert plan is not None
    scheduler.apply(plan, {FIRST: (1,), SECOND: (1,)})
    for sequence in sequences:
        sequence.draft_token_ids = (2, 3, 4)

    assert lengths(scheduler.schedule()) == {0: 3, 1: 1}
    assert [sequence.draft_token_ids for sequence in sequences] == [(2, 3), ()]


# ---- order ----


def test_stated_priorities_come_first_then_arrival(
    create_scheduler: CreateScheduler, create_sequence: CreateSequence, simulate: type[Simulation]
) -> None:
    """1 is the highest; 0 is the default and ranks after every stated priority."""
    simulation = simulate(create_scheduler(max_batch_size=1))
    simulation.add(*(create_sequence(i, priority=p, max_new_tokens=1) for i, p in enumerate((0, 7, 1, 0, 1))))
    simulation.run()

    assert [piece.sequence_id for plan in simulation.plans for piece in plan.slices] == [2, 4, 1, 0, 3]


def test_a_prompt_of_higher_priority_goes_before_the_rest_of_one_under_way(
    create_scheduler: CreateScheduler, create_sequence: CreateSequence, simulate: type[Simulation]
) -> None:
    """A long prompt in chunks does not hold up what is more urgent; what is not waits for its end."""
    simulation = simulate(create_scheduler(max_num_tokens=8))
    simulation.add(create_sequence(0, 20))
    simulation.step()
    simulation.add(create_sequence(1, 2), create_sequence(2, 10, priority=1))

    assert [lengths(simulation.step()) for _ in range(3)] == [{2: 8}, {2: 2, 0: 6}, {2: 1, 0: 6, 1: 1}]


def test_no_more_run_than_can_generate_in_one_step(
    create_scheduler: CreateScheduler, create_sequence: CreateSequence, simulate: type[Simulation]
) -> None:
    """Under a budget of 2 tokens a third sequence waits, however urgent and whatever `max_batch_size` says."""
    simulation = simulate(create_scheduler(max_num_tokens=2))
    simulation.add(create_sequence(0, 10))
    simulation.step()
    simulation.add(*(create_sequence(i, 1, max_new_tokens=3, priority=1) for i in (1, 2)))

    assert [lengths(simulation.step()) for _ in range(4)] == [{1: 1, 0: 1}, {1: 1, 0: 1}, {1: 1, 0: 1}, {2: 1, 0: 1}]


@pytest.mark.parametrize(
    ("policy", "second_step"), [("guaranteed_no_evict", {0: 1}), ("max_utilization", {0: 1, 1: 3})]
)
def test_what_has_to_fit_before_a_sequence_starts(
    create_scheduler: CreateScheduler,
    create_sequence: CreateSequence,
    simulate: type[Simulation],
    policy: str,
    second_step: dict[int, int],
) -> None:
    """With 2 of 4 blocks taken, a prompt of 3 blocks starts only where its first chunk is enough."""
    simulation = simulate(create_scheduler(num_blocks=4, max_num_tokens=4, policy=policy))
    simulation.add(create_sequence(0, 4, max_new_tokens=5), create_sequence(1, 12, max_new_tokens=1))

    assert [lengths(simulation.step()) for _ in range(2)] == [{0: 4}, second_step]


def test_the_guarantee_counts_what_the_running_may_still_take(
    create_scheduler: CreateScheduler, create_sequence: CreateSequence, simulate: type[Simulation]
) -> None:
    """In 6 blocks a sequence that may grow to 4 blocks keeps one of 3 out, though it holds only 1 so far."""
    simulation = simulate(create_scheduler(num_blocks=6))
    simulation.add(create_sequence(0, 4, max_new_tokens=13), create_sequence(1, 4, max_new_tokens=9))

    assert lengths(simulation.step()) == {0: 4}
    simulation.run()
    assert sum(sequence.num_preemptions for sequence in simulation.sequences.values()) == 0


def test_a_big_request_at_the_head_is_not_starved_by_small_ones(
    create_scheduler: CreateScheduler, create_sequence: CreateSequence, simulate: type[Simulation]
) -> None:
    """Small requests that arrive all the time wait behind a big one, which starts once the pool has drained."""
    simulation = simulate(create_scheduler(num_blocks=8))
    simulation.add(create_sequence(0, 4, max_new_tokens=5), create_sequence(1, 20, max_new_tokens=12))
    for index in range(2, 12):
        simulation.add(create_sequence(index, 4, max_new_tokens=5))
        simulation.step()

    assert simulation.sequences[SECOND].first_scheduled_time_ns
    started = sorted(
        (s for s in simulation.sequences.values() if s.first_scheduled_time_ns), key=lambda s: s.first_scheduled_time_ns
    )
    assert [sequence.sequence_id for sequence in started[:2]] == [0, 1]


# ---- pausing ----


def test_max_utilization_pauses_the_last_in_order_and_computes_it_again(
    create_scheduler: CreateScheduler, create_sequence: CreateSequence, simulate: type[Simulation]
) -> None:
    """In 4 blocks of 4, two sequences of 2 blocks run until the first needs a third: the second makes room."""
    simulation = simulate(create_scheduler(num_blocks=4, policy="max_utilization", enable_reuse=False))
    simulation.add(create_sequence(0, 7, max_new_tokens=6), create_sequence(1, 7, max_new_tokens=6))
    seen = [lengths(simulation.step()) for _ in range(6)]

    assert seen == [{0: 7, 1: 7}, {0: 1, 1: 1}, {0: 1}, {0: 1}, {0: 1}, {0: 1}]
    first, second = simulation.sequences[FIRST], simulation.sequences[SECOND]
    assert (second.status, second.num_output_tokens, second.block_ids) == (SequenceStatus.WAITING, 2, [])
    assert lengths(simulation.step()) == {1: 9}
    simulation.run()
    assert (first.num_preemptions, second.num_preemptions, second.num_recomputed_tokens) == (0, 1, 8)
    assert first.first_scheduled_time_ns < second.first_scheduled_time_ns < second.first_token_time_ns
    assert simulation.output(SECOND) == simulation.expected_output(SECOND)


def test_a_paused_sequence_finds_its_blocks_again(
    create_scheduler: CreateScheduler, create_sequence: CreateSequence, simulate: type[Simulation]
) -> None:
    """With reuse, blocks of a paused sequence that were not overwritten shorten its recomputation."""
    simulation = simulate(create_scheduler(num_blocks=4, policy="max_utilization"))
    simulation.add(create_sequence(0, 7, max_new_tokens=6), create_sequence(1, 7, max_new_tokens=6))
    simulation.run()

    second = simulation.sequences[SECOND]
    assert (second.num_preemptions, second.num_recomputed_tokens, second.num_reused_blocks) == (1, 4, 1)
    assert second.num_cached_prompt_tokens == 0  # it had computed them itself


def test_the_last_in_order_waits_with_its_blocks_for_those_already_served(
    create_scheduler: CreateScheduler, create_sequence: CreateSequence, simulate: type[Simulation]
) -> None:
    """A prompt that runs out of blocks half way is left out, not paused: what it computed is kept."""
    simulation = simulate(create_scheduler(num_blocks=4, max_num_tokens=6, policy="max_utilization"))
    simulation.add(create_sequence(0, 4, max_new_tokens=5), create_sequence(1, 12, max_new_tokens=2))
    seen = [lengths(simulation.step()) for _ in range(6)]

    assert seen == [{0: 4, 1: 2}, {0: 1, 1: 5}, {0: 1, 1: 1}, {0: 1}, {0: 1}, {1: 4}]
    assert simulation.sequences[SECOND].num_preemptions == 0


def test_drafts_pause_nobody(create_scheduler: CreateScheduler, create_sequence: CreateSequence) -> None:
    """Where no block is free, drafts are cut to the slots that the sequence already has."""
    scheduler = create_scheduler(num_blocks=4, policy="max_utilization")
    sequences = [create_sequence(i, 5, max_new_tokens=9) for i in range(2)]
    for sequence in sequences:
        scheduler.add(sequence)
    plan = scheduler.schedule()
    assert plan is not None
    scheduler.apply(plan, {FIRST: (1,), SECOND: (1,)})
    sequences[0].draft_token_ids = (2, 3, 4, 5)

    assert lengths(scheduler.schedule()) == {0: 3, 1: 1}
    assert scheduler.iteration_stats().num_paused_sequences == 0


# ---- reuse ----


def test_a_prompt_starts_behind_its_cached_prefix(
    create_scheduler: CreateScheduler, create_sequence: CreateSequence, simulate: type[Simulation]
) -> None:
    """Of a repeated prompt of 9 tokens 2 full blocks are found; one of 8 computes its second block for the logits."""
    simulation = simulate(create_scheduler())
    for index, num_prompt_tokens in enumerate((9, 9, 8)):
        simulation.add(create_sequence(index, num_prompt_tokens, max_new_tokens=1, first_token=0))
        simulation.step()

    assert [lengths(plan) for plan in simulation.plans] == [{0: 9}, {1: 1}, {2: 4}]
    stats = simulation.sequences[SECOND].stats()
    assert (stats.num_cached_prompt_tokens, stats.num_reused_blocks, stats.num_new_blocks) == (8, 2, 1)
    assert stats.num_allocated_blocks == 3


def test_siblings_wait_for_the_first_prompt_and_share_it(
    create_scheduler: CreateScheduler,
    create_sequence: CreateSequence,
    create_siblings: CreateSiblings,
    simulate: type[Simulation],
) -> None:
    """Three sequences of one prompt compute it once, also in chunks; others behind them are not held up."""
    simulation = simulate(create_scheduler(max_num_tokens=8))
    simulation.add(*create_siblings(create_sequence(0, 10, max_new_tokens=3, num_return_sequences=3)))
    simulation.add(create_sequence(3, 2))

    assert [lengths(simulation.step()) for _ in range(3)] == [
        {0: 8},
        {0: 2, 1: 2, 2: 2, 3: 2},
        {0: 1, 1: 1, 2: 1, 3: 1},
    ]


def test_siblings_do_not_wait_without_reuse(
    create_scheduler: CreateScheduler,
    create_sequence: CreateSequence,
    create_siblings: CreateSiblings,
    simulate: type[Simulation],
) -> None:
    """What cannot be shared is computed at once."""
    simulation = simulate(create_scheduler(enable_reuse=False))
    simulation.add(*create_siblings(create_sequence(0, 10, num_return_sequences=3)))

    assert lengths(simulation.step()) == {0: 10, 1: 10, 2: 10}


def test_context_logits_compute_every_prompt_token_and_want_every_row(
    create_scheduler: CreateScheduler, create_sequence: CreateSequence, simulate: type[Simulation]
) -> None:
    """A cached prefix is not used; each chunk wants all its rows."""
    simulation = simulate(create_scheduler(max_num_tokens=6))
    simulation.add(create_sequence(0, 10, max_new_tokens=1, first_token=0))
    simulation.run()
    simulation.add(create_sequence(1, 10, max_new_tokens=2, first_token=0, return_context_logits=True))

    assert [rows(simulation.step()) for _ in range(3)] == [{1: 6}, {1: 4}, {1: 1}]


# ---- ends, refusals, counts ----


def test_siblings_with_context_logits_do_not_wait(
    create_scheduler: CreateScheduler,
    create_sequence: CreateSequence,
    create_siblings: CreateSiblings,
    simulate: type[Simulation],
) -> None:
    """Every one of them computes the prompt anyway."""
    simulation = simulate(create_scheduler())
    simulation.add(*create_siblings(create_sequence(0, 10, num_return_sequences=2, return_context_logits=True)))

    assert lengths(simulation.step()) == {0: 10, 1: 10}


@pytest.mark.parametrize("num_steps", [0, 1, 2])
def test_finish_works_from_any_state(
    create_scheduler: CreateScheduler, create_sequence: CreateSequence, simulate: type[Simulation], num_steps: int
) -> None:
    """Cancelling a waiting, a half computed or a generating sequence frees what it held."""
    simulation = simulate(create_scheduler(max_num_tokens=6))
    simulation.add(create_sequence(0, 10))
    for _ in range(num_steps):
        simulation.step()
    simulation.scheduler.finish(FIRST)
    simulation.scheduler.audit()

    assert simulation.step() is None
    assert simulation.pool.num_free_blocks == simulation.pool.num_blocks


def test_who_continues_a_finished_sequence_computes_only_what_is_new(
    create_scheduler: CreateScheduler, create_sequence: CreateSequence
) -> None:
    """The last block is taken over though it is not full: a round of drafts, a chat's next turn, goes on from there."""
    scheduler = create_scheduler(tokens_per_block=8)
    first = create_sequence(0, num_prompt_tokens=11)
    scheduler.add(first)
    for token in (5, 6):
        plan = scheduler.schedule()
        assert plan is not None
        scheduler.apply(plan, {FIRST: (token,)})
    scheduler.finish(FIRST)
    request = replace(first.request, prompt_token_ids=tuple(first.token_ids))
    scheduler.add(Sequence(SECOND, request))
    plan = scheduler.schedule()
    assert plan is not None

    (piece,) = plan.slices
    assert (piece.num_past_tokens, piece.token_ids) == (12, (6,))
    scheduler.audit()


def test_a_sequence_that_ended_after_planning_is_skipped(
    create_scheduler: CreateScheduler, create_sequence: CreateSequence
) -> None:
    """A sequence that failed between plan and apply is gone, nothing of it counted; the others of the step go on."""
    scheduler = create_scheduler()
    scheduler.add(create_sequence(2, first_token=1000))
    plan = scheduler.schedule()
    assert plan is not None
    scheduler.apply(plan, {THIRD: (5,)})
    scheduler.finish(THIRD)
    first, second = create_sequence(0), create_sequence(1)
    scheduler.add(first)
    scheduler.add(second)
    plan = scheduler.schedule()
    assert plan is not None
    scheduler.finish(FIRST)
    scheduler.apply(plan, {SECOND: (5,)})
    scheduler.audit()

    assert second.num_output_tokens == 1
    assert (first.num_cached_prompt_tokens, first.num_computed_tokens, first.peak_computed_tokens) == (5, 5, 5)
    assert lengths(scheduler.schedule()) == {1: 1}


@pytest.mark.parametrize(
    ("limits", "prompt", "max_new", "message"),
    [
        ({"max_seq_len": 20}, 15, 6, "`request_output_len` does not fit into `max_seq_len` of 20 .* limit 5, given 6"),
        ({"num_blocks": 4}, 12, 6, "`request_output_len` does not fit into the KV cache of 17 .* limit 5, given 6"),
        ({"max_num_tokens": 8, "enable_chunked_context": False}, 9, 1, "`input_ids` is longer .* limit 8, given 9"),
        ({}, 0, 1, "`input_ids` is empty"),
        ({}, 1, 0, "`request_output_len` must be at least 1; given 0"),
    ],
)
def test_what_can_never_fit_is_refused(
    create_scheduler: CreateScheduler,
    create_sequence: CreateSequence,
    limits: dict[str, int],
    prompt: int,
    max_new: int,
    message: str,
) -> None:
    """The refusal names field, limit and value, and leaves nothing behind; one token less is accepted."""
    scheduler = create_scheduler(**limits)

    with pytest.raises(InvalidRequestError, match=message):
        scheduler.add(create_sequence(0, prompt, max_new))
    assert not scheduler.has_work
    if prompt and max_new:
        fitting = (prompt - 1, max_new) if max_new == 1 else (prompt, max_new - 1)
        scheduler.add(create_sequence(0, *fitting))
        assert scheduler.num_waiting == 1


@pytest.mark.parametrize("name", ["max_num_tokens", "max_batch_size", "max_seq_len"])
def test_limits_are_positive(name: str) -> None:
    """A limit of zero is a configuration error that names it."""
    config = SchedulerConfig(max_num_tokens=1, max_batch_size=1, max_seq_len=1)

    with pytest.raises(ConfigurationError, match=f"`{name}` must be at least 1; given 0"):
        replace(config, **{name: 0})


def test_iteration_statistics(
    create_scheduler: CreateScheduler, create_sequence: CreateSequence, simulate: type[Simulation]
) -> None:
    """The counts of the last step, and who runs and waits after it."""
    simulation = simulate(create_scheduler(max_num_tokens=8, max_batch_size=2))
    simulation.add(create_sequence(0, 4), create_sequence(1, 10), create_sequence(2, 4))
    simulation.step()
    simulation.step()

    assert simulation.scheduler.iteration_stats() == IterationStats(
        iteration=2,
        num_scheduled_sequences=2,
        num_context_sequences=1,
        num_generation_sequences=1,
        num_context_tokens=6,
        num_paused_sequences=0,
        num_active_sequences=2,
        num_waiting_sequences=1,
    )


def test_times_come_from_the_clock(
    create_scheduler: CreateScheduler, create_sequence: CreateSequence, simulate: type[Simulation]
) -> None:
    """Arrival is the request's; start, first and last token are read from the clock as they happen."""
    simulation = simulate(create_scheduler())
    simulation.add(create_sequence(0, max_new_tokens=3, arrival_time_ns=-5))
    simulation.run()

    stats = simulation.sequences[FIRST].stats()
    times = (stats.first_scheduled_time_ns, stats.first_token_time_ns, stats.last_token_time_ns)
    assert (stats.arrival_time_ns, *times) == (-5, 1, 2, 4)


@pytest.mark.parametrize("sampled", [(), (3, 4), (8, 4, 5)])
def test_tokens_that_do_not_follow_from_the_plan_are_an_assertion(
    create_scheduler: CreateScheduler, create_sequence: CreateSequence, sampled: tuple[int, ...]
) -> None:
    """No token where one was due, more than the drafts allow, or tokens that contradict them, are our bugs."""
    scheduler = create_scheduler()
    sequence = create_sequence(0, max_new_tokens=9)
    scheduler.add(sequence)
    plan = scheduler.schedule()
    assert plan is not None
    scheduler.apply(plan, {FIRST: (1,)})
    sequence.draft_token_ids = (8,)
    plan = scheduler.schedule()
    assert plan is not None

    with pytest.raises(AssertionError, match="sampled"):
        scheduler.apply(plan, {FIRST: sampled})
