"""Divergence, agreement and perplexity against plain loops."""

from __future__ import annotations

import math

import numpy as np
import pytest

from enginehouse_builders.gates.divergence import Divergence, ScoredSequence, compare, first_bad_position


def _slow(sequence: ScoredSequence, build: np.ndarray, reference: np.ndarray) -> Divergence:
    """One position and one token at a time, in Python's floats."""

    def log_shares(row: np.ndarray) -> list[float]:
        total = sum(math.exp(float(value)) for value in row)
        return [float(value) - math.log(total) for value in row]

    kls, agreeing, nll, reference_nll = [], 0, 0.0, 0.0
    ids, num_prompt = sequence.token_ids, sequence.num_prompt_tokens
    for position in range(len(ids)):
        p, q = log_shares(reference[position]), log_shares(build[position])
        kls.append(max(sum(math.exp(a) * (a - b) for a, b in zip(p, q, strict=True)), 0.0))
        if position + 1 < len(ids):
            if position + 1 >= num_prompt:
                agreeing += int(np.argmax(build[position])) == ids[position + 1]
            elif sequence.is_text:
                nll -= q[ids[position + 1]]
                reference_nll -= p[ids[position + 1]]
    num_text = num_prompt - 1 if sequence.is_text else 0
    return Divergence(len(ids), sum(kls), max(kls), len(ids) - num_prompt, agreeing, num_text, nll, reference_nll)


@pytest.mark.parametrize("seed", range(20))
def test_it_is_what_plain_loops_say(seed: int) -> None:
    """For any lengths, vocabularies and differences, also where the logits are large."""
    rng = np.random.default_rng(seed)
    num_tokens, vocab = int(rng.integers(2, 30)), int(rng.integers(2, 60))
    reference = (rng.normal(size=(num_tokens, vocab)) * rng.choice([1, 10]) + 20).astype(np.float32)
    build = reference + rng.normal(size=reference.shape).astype(np.float32) * np.float32(rng.choice([0.0, 0.01, 3.0]))
    num_prompt = int(rng.integers(1, num_tokens + 1))
    ids = tuple(rng.integers(0, vocab, num_tokens).tolist())
    sequence = ScoredSequence(ids, num_prompt, is_text=bool(rng.integers(2)))

    found, expected = compare(sequence, build, reference), _slow(sequence, build, reference)

    assert found.sum_kl == pytest.approx(expected.sum_kl, rel=1e-4, abs=1e-4)
    assert found.max_kl == pytest.approx(expected.max_kl, rel=1e-4, abs=1e-4)
    assert found.sum_nll == pytest.approx(expected.sum_nll, rel=1e-5, abs=1e-4)
    assert found.sum_reference_nll == pytest.approx(expected.sum_reference_nll, rel=1e-5, abs=1e-4)
    for name in ("num_positions", "num_answer_tokens", "num_agreeing_tokens", "num_text_tokens"):
        assert getattr(found, name) == getattr(expected, name)


def test_a_build_does_not_differ_from_itself() -> None:
    """Equal logits: no divergence, all of its own greedy tokens, one perplexity."""
    logits = np.random.default_rng(0).normal(size=(6, 9)).astype(np.float32)
    ids = (1, 2, *logits[1:5].argmax(axis=1).tolist())
    found = compare(ScoredSequence(ids, 2, is_text=True), logits, logits)
    assert found.mean_kl == 0.0
    assert found.token_agreement == 1.0
    assert found.perplexity == found.reference_perplexity


def test_sums_over_sequences_add_up() -> None:
    """The mean over two sequences is the mean over all their positions."""
    first = Divergence(2, 1.0, 0.9, 1, 1, 1, 2.0, 1.0)
    second = Divergence(6, 3.0, 0.7, 3, 1, 5, 4.0, 4.0)
    both = first + second
    assert (both.mean_kl, both.max_kl, both.token_agreement) == (0.5, 0.9, 0.5)
    assert both.perplexity == pytest.approx(math.exp(1.0))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_the_first_position_that_is_no_number_is_found(value: float) -> None:
    """NaN and both infinities count; finite logits have none."""
    logits = np.zeros((4, 3), np.float32)
    assert first_bad_position(logits) is None
    logits[2, 1] = value
    assert first_bad_position(logits) == 2
