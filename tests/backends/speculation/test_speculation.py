"""Drafting by prompt lookup and the choice of draft lengths, against slow oracles."""

from __future__ import annotations

import itertools
import random

import pytest

from enginehouse_backends.speculation.controller import StepCostModel, choose_draft_lengths
from enginehouse_backends.speculation.ngram import NgramProposer


def naive_draft(token_ids: list[int], max_tokens: int) -> tuple[int, ...]:
    """Follow the latest earlier occurrence of the longest suffix of 4, 3 or 2 tokens."""
    for size in (4, 3, 2):
        if len(token_ids) <= size:
            continue
        suffix = token_ids[-size:]
        for start in range(len(token_ids) - size - 1, -1, -1):
            if token_ids[start : start + size] == suffix:
                return tuple(token_ids[start + size :][:max_tokens])
    return ()


@pytest.mark.parametrize("seed", range(20))
def test_a_fresh_match_is_the_latest_occurrence_of_the_longest_suffix(seed: int) -> None:
    """Until a match is being followed, the proposer drafts what the naive search drafts."""
    rng = random.Random(seed)
    tokens = [rng.randrange(6) for _ in range(60)]
    fresh = [cut for cut in range(2, 60) if naive_draft(tokens[: cut - 1], 1) != (tokens[cut - 1],)]

    for cut in fresh:
        assert naive_draft(tokens[:cut], 5) == NgramProposer(tokens[:cut]).propose(5)


def test_a_match_is_followed_while_it_goes_on() -> None:
    """A long copy is followed to its end although later, shorter matches appear."""
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    proposer = NgramProposer([*text, 0, 1, 2])

    assert proposer.propose(3) == (3, 4, 5)
    proposer.extend([3, 4, 5, 6])
    assert proposer.propose(4) == (7, 8, 9, 0)
    assert proposer.acceptance > 0.8


def test_acceptance_is_measured_without_drafting() -> None:
    """A proposer whose guesses stop coming true reports a falling acceptance, and a rising one when they return."""
    proposer = NgramProposer([1, 2, 3, 4, 5, 6, 1, 2])
    low = proposer.acceptance
    for token_id in range(100, 140):
        proposer.extend([1, 2, token_id])
    falling = proposer.acceptance
    proposer.extend([1, 2, 3, 4, 1, 2, 3, 4] * 8)

    assert falling < 0.3 < low < 0.9 < proposer.acceptance


def test_a_short_sequence_has_no_draft() -> None:
    """Nothing is drafted before two tokens repeat."""
    assert NgramProposer([]).propose(4) == ()
    assert NgramProposer([7]).propose(4) == ()
    assert NgramProposer([7, 8, 9]).propose(4) == ()


def make_cost(seed: int) -> StepCostModel:
    """Return a model of a machine whose steps get dearer per token the larger they are."""
    rng = random.Random(seed)
    fixed_s, slope_s, bend_s = rng.uniform(0.001, 0.02), rng.uniform(0.0002, 0.005), rng.uniform(0.0, 0.0003)
    model = StepCostModel()
    for size in range(1, 33):
        model.observe(size, fixed_s + slope_s * size + bend_s * size * size)
    return model


@pytest.mark.parametrize("seed", range(30))
def test_chosen_lengths_maximise_the_expected_rate(seed: int) -> None:
    """No other assignment of draft lengths has a higher expected rate than the chosen one, within the gain margin."""
    rng = random.Random(seed)
    acceptances = [rng.uniform(0.05, 0.98) for _ in range(3)]
    longest = [rng.randrange(5) for _ in range(3)]
    cost = make_cost(seed)

    def rate(lengths: tuple[int, ...] | list[int]) -> float:
        expected = sum(sum(a**i for i in range(n + 1)) for a, n in zip(acceptances, lengths, strict=True))
        duration_s = cost.predict(len(lengths) + sum(lengths))
        assert duration_s is not None
        return expected / duration_s

    best = max(rate(lengths) for lengths in itertools.product(*(range(n + 1) for n in longest)))
    chosen = choose_draft_lengths(acceptances, longest, cost.predict, budget_tokens=100)

    assert rate(chosen) == pytest.approx(best) or (not any(chosen) and best < 1.05 * rate([0, 0, 0]) * (1 + 1e-9))


def test_no_drafts_where_each_token_costs_a_whole_step() -> None:
    """When verifying a token costs as much as generating one, drafts that may fail are never worth it."""
    assert choose_draft_lengths([0.9, 0.5], [8, 8], lambda num_tokens: 0.01 * num_tokens, budget_tokens=16) == [0, 0]


def test_the_budget_bounds_the_drafts_of_a_step() -> None:
    """No more drafts are chosen than the step may hold, the likeliest first."""

    def cheap(num_tokens: int) -> float:
        return 0.1 + 0.001 * num_tokens

    assert choose_draft_lengths([0.99, 0.5], [8, 8], cheap, budget_tokens=3) == [3, 0]


def test_nothing_is_drafted_before_a_step_was_measured() -> None:
    """Without any measurement there are no drafts."""
    assert choose_draft_lengths([0.9], [4], StepCostModel().predict, budget_tokens=8) == [0]


def test_the_cost_model_interpolates_between_measured_sizes() -> None:
    """Known sizes are answered as measured, those between on a line, those beyond with the last slope."""
    model = StepCostModel()
    for _ in range(10):
        model.observe(2, 0.010)
        model.observe(6, 0.030)

    assert model.predict(2) == pytest.approx(0.010)
    assert model.predict(4) == pytest.approx(0.020)
    assert model.predict(10) == pytest.approx(0.050)
    assert model.predict(1) == pytest.approx(0.010)


def test_the_cost_model_assumes_a_share_before_it_has_seen_two_sizes() -> None:
    """With steps of one size only, another token is assumed to cost a quarter of a one-token step."""
    model = StepCostModel()
    model.observe(1, 0.020)

    assert model.predict(2) == pytest.approx(0.025)


def test_a_size_that_was_slow_once_is_tried_again() -> None:
    """One slow step does not count for ever: a size not measured for long is judged by its neighbours again."""
    model = StepCostModel()
    model.observe(8, 1.0)
    for _ in range(100):
        model.observe(4, 0.010)
        model.observe(12, 0.020)

    assert model.predict(8) == pytest.approx(0.015)


def test_the_cost_model_follows_the_machine() -> None:
    """When steps become slower, so do predictions, after a few of them."""
    model = StepCostModel()
    for _ in range(5):
        model.observe(4, 0.010)
    for _ in range(20):
        model.observe(4, 0.030)

    assert model.predict(4) == pytest.approx(0.030, rel=0.05)
