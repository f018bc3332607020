"""Sampling against a naive sampler over the whole vocabulary, with and without help of the K largest logits."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from enginehouse_backends.engine.candidates import candidates_of_top, k_largest, likely_then_all
from enginehouse_backends.engine.logits_processor import LogitsProcessor
from enginehouse_backends.engine.request import GenerationRequest, RequestId, SamplingParams
from enginehouse_backends.engine.sampler import SequenceSampler
from enginehouse_backends.engine.words import BadWords
from enginehouse_backends.tokenization.vocabulary import Vocabulary
from enginehouse_contract.errors import EngineFailureError

VOCAB_SIZE = 200
VOCABULARY = Vocabulary([f"<{i}>".encode() for i in range(VOCAB_SIZE)], frozenset(), is_byte_level=True)


class Logits:
    """A step's logits with the *num_columns* largest of each row."""

    def __init__(self, rows: np.ndarray, num_columns: int) -> None:
        self._rows = rows.astype(np.float32)
        order = np.argsort(-self._rows, axis=1, kind="stable")[:, :num_columns]
        self.top_ids = order.astype(np.int32)
        self.top_values = np.take_along_axis(self._rows, order, axis=1)
        shifted = self._rows.astype(np.float64)
        with np.errstate(invalid="ignore"):
            self.log_sum_exp = np.log(np.exp(shifted).sum(axis=1)).astype(np.float32)
        self.num_full_rows = 0

    def full_row(self, row: int) -> np.ndarray:
        """Return a copy of a row and count it."""
        self.num_full_rows += 1
        return self._rows[row].copy()


def make_sampler(seed: int = 1, *, prompt: tuple[int, ...] = (1, 2), **fields: Any) -> SequenceSampler:
    """Return a sampler; *fields* of the request or of its sampling parameters."""
    own = {name: fields.pop(name) for name in ("end_id", "min_new_tokens", "bad_words") if name in fields}
    request = GenerationRequest(
        request_id=RequestId("r"),
        prompt_token_ids=prompt,
        max_new_tokens=50,
        sampling=SamplingParams(**fields),
        **own,
    )
    return SequenceSampler(request, 0, VOCABULARY, seed)


def naive_distribution(row: np.ndarray, seen: list[int], params: SamplingParams, banned: set[int]) -> dict[int, float]:
    """Return token -> probability by the definitions, over the whole row."""
    values = [float(value) for value in row]
    for token in range(len(values)):
        if params.embedding_bias is not None:
            values[token] += float(params.embedding_bias[token])
        count = seen.count(token)
        if count:
            value = values[token]
            scaled = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
            values[token] = scaled - params.presence_penalty
        values[token] -= params.frequency_penalty * count
        if token in banned:
            values[token] = -math.inf
    order = sorted(range(len(values)), key=lambda token: (-values[token], token))
    if params.is_greedy:
        return {order[0]: 1.0}
    if params.top_k:
        order = order[: params.top_k]
    weights = [math.exp((values[token] - values[order[0]]) / params.temperature) for token in order]
    total, kept, mass = sum(weights), {}, 0.0
    for token, weight in zip(order, weights, strict=True):
        kept[token] = weight
        mass += weight
        if params.top_p < 1.0 and mass >= params.top_p * total * (1 - 1e-12):
            break
    return {token: weight / mass for token, weight in kept.items() if weight}


CASES: list[dict[str, Any]] = [
    {},
    {"repetition_penalty": 1.5},
    {"repetition_penalty": 0.7},
    {"presence_penalty": 2.0, "frequency_penalty": 0.5},
    {"frequency_penalty": -0.5},
    {"top_k": 5},
    {"top_k": 5, "top_p": 0.6, "temperature": 0.7},
    {"top_k": 40, "repetition_penalty": 1.3},
    {"top_k": 0, "top_p": 0.5},
    {"top_k": 0, "top_p": 0.9, "temperature": 1.7},
    {"top_k": 0},
    {"top_k": 0, "temperature": 0.3, "presence_penalty": 1.0},
    {"top_k": 3, "bad_words": ((5,), (7,))},
    {"bad_words": ((3,), (4,))},
]


@pytest.mark.parametrize("num_columns", [16, VOCAB_SIZE])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_distribution_is_the_naive_one(case: dict[str, Any], num_columns: int) -> None:
    """Over many seeds, every token that is drawn is allowed, and frequencies are those of the definition."""
    rng = np.random.default_rng(5)
    row = rng.normal(scale=2.0, size=VOCAB_SIZE)
    logits = Logits(row[None], num_columns)
    fields = dict(case)
    banned = {word[0] for word in fields.get("bad_words", ())}
    params = SamplingParams(**{k: v for k, v in fields.items() if k != "bad_words"})
    prompt = tuple(np.argsort(-row)[[0, 1, 3, 3, 60]].tolist())
    expected = naive_distribution(row.astype(np.float32), list(prompt), params, banned)
    num_draws = 1 if params.is_greedy else 1500
    drawn = [make_sampler(seed, prompt=prompt, **fields).sample(logits, 0).token_id for seed in range(num_draws)]
    counts = {token: drawn.count(token) for token in set(drawn)}

    assert set(counts) <= set(expected)
    chi_square = sum((counts.get(t, 0) - p * num_draws) ** 2 / (p * num_draws) for t, p in expected.items())
    degrees = max(1, len(expected) - 1)
    assert chi_square < degrees + 5 * math.sqrt(2 * degrees) + 5


@pytest.mark.parametrize("seed", range(25))
def test_the_k_largest_and_the_whole_row_give_the_same_token(seed: int) -> None:
    """Which logits were at hand never changes the token, also with ties."""
    rng = np.random.default_rng(seed)
    row = np.round(rng.normal(scale=3.0, size=VOCAB_SIZE), 1)
    prompt = tuple(rng.integers(0, VOCAB_SIZE, 8).tolist())
    for case in CASES:
        tokens = [
            make_sampler(seed, prompt=prompt, **dict(case)).sample(Logits(row[None], columns), 0).token_id
            for columns in (8, 64, VOCAB_SIZE)
        ]
        assert len(set(tokens)) == 1, case


TEMPERATURES = (0.05, 0.3, 0.7, 0.95, 1.0, 1.05, 1.5, 4.0)


def peaked_row(rng: np.random.Generator) -> np.ndarray:
    """Return a row as language models make them: few likely tokens above a broad floor."""
    row = rng.normal(scale=rng.uniform(0.5, 3.0), size=VOCAB_SIZE)
    row[rng.choice(VOCAB_SIZE, 12, replace=False)] += rng.exponential(6.0, size=12)
    return row - rng.uniform(0, 60)


@pytest.mark.parametrize("seed", range(40))
def test_however_the_logits_lie_both_paths_agree(seed: int) -> None:
    """Over temperatures, cuts, penalties and bans, few columns and the whole row give the same token."""
    rng = np.random.default_rng(1000 + seed)
    row = peaked_row(rng)
    few, whole = Logits(row[None], 24), Logits(row[None], VOCAB_SIZE)
    for temperature in TEMPERATURES:
        case: dict[str, Any] = {
            "temperature": temperature,
            "top_k": int(rng.choice([0, 0, 4, 24, 1000])),
            "top_p": float(rng.choice([0.2, 0.9, 0.95, 1.0])),
            "repetition_penalty": float(rng.choice([1.0, 1.0, 1.2, 0.9])),
            "frequency_penalty": float(rng.choice([0.0, 0.0, 0.4, -0.2])),
            "bad_words": tuple((int(i),) for i in np.argsort(-row)[: rng.choice([0, 0, 1, 6])]),
        }
        prompt = tuple(rng.choice(np.argsort(-row)[:30], 10).tolist())
        for draw_seed in range(10):
            tokens = [
                make_sampler(draw_seed, prompt=prompt, **dict(case)).sample(at, 0).token_id for at in (few, whole)
            ]
            assert tokens[0] == tokens[1], case


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("seed", range(10))
def test_the_weight_left_out_lies_within_its_bounds(seed: int, temperature: float) -> None:
    """What the tokens outside the largest weigh is bounded from their logits' sum alone; bans only lower it."""
    rng = np.random.default_rng(seed)
    row = peaked_row(rng)
    logits = Logits(row[None], 24)
    for bad_words in ((), tuple((int(i),) for i in np.argsort(-row)[[2, 30, 31]])):
        request = GenerationRequest(
            request_id=RequestId("r"), prompt_token_ids=(), max_new_tokens=1, bad_words=bad_words
        )
        processor = LogitsProcessor(request, BadWords(VOCABULARY, bad_words))
        values = logits.full_row(0).astype(np.float64)
        processor.apply_to_row(values)
        weights = np.exp((values - values.max()) / temperature)
        top = candidates_of_top(logits, 0, processor, temperature, VOCAB_SIZE)
        likely, everything = likely_then_all(values, temperature)

        assert top is not None
        assert top.min_rest <= np.delete(weights, top.token_ids).sum() <= top.max_rest
        assert likely.min_rest <= np.delete(weights, likely.token_ids).sum() <= likely.max_rest
        order = np.lexsort((np.arange(VOCAB_SIZE), -values)).tolist()
        assert everything.token_ids.tolist() == order
        assert likely.token_ids.tolist() == order[: len(likely.token_ids)]
        assert top.token_ids[: top.num_certain].tolist() == order[: top.num_certain]
        for top_k in (1, 7, VOCAB_SIZE, 2 * VOCAB_SIZE):
            assert k_largest(values, temperature, top_k).token_ids.tolist() == order[:top_k]


def test_common_settings_seldom_read_a_whole_row() -> None:
    """With top-k, or top-p at usual temperatures, the largest logits decide nearly always."""
    rng = np.random.default_rng(3)
    rows = np.stack([peaked_row(rng) for _ in range(50)])
    rows[:, :30] += 12.0
    logits = Logits(rows, 64)
    cases = [
        {"top_k": 50},
        {"top_k": 50, "top_p": 0.9, "temperature": 1.5},
        {"top_k": 0, "top_p": 0.9},
        {"top_k": 0, "top_p": 0.9, "temperature": 0.7},
        {"top_k": 0, "top_p": 0.95, "temperature": 0.8, "repetition_penalty": 1.1},
    ]
    for case in cases:
        for row in range(50):
            make_sampler(row, **case).sample(logits, row)

    assert logits.num_full_rows <= 0.04 * 50 * len(cases)


def test_a_row_is_sampled_the_same_alone_and_among_others() -> None:
    """Which row of which step a sequence gets does not matter."""
    rng = np.random.default_rng(4)
    rows = np.stack([peaked_row(rng) for _ in range(8)])
    together = Logits(rows, 24)
    for case in CASES:
        for row in range(8):
            alone = make_sampler(7, **dict(case)).sample(Logits(rows[row : row + 1], 24), 0)
            assert make_sampler(7, **dict(case)).sample(together, row) == alone


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("case", [{}, {"top_k": 8}, {"top_k": 0, "temperature": 2.0}], ids=str)
def test_no_output_ever_contains_a_bad_word(case: dict[str, Any], seed: int) -> None:
    """Words of several tokens are banned across token boundaries, whichever way they are spelled."""
    rng = np.random.default_rng(seed)
    pieces = [b"a", b"b", b"c", b"ab", b"ba", b"aa", b"bb", b"abc", b"cab", b"bca"]
    vocabulary = Vocabulary(pieces, frozenset(), is_byte_level=True)
    bad_words = ((3, 2), (1, 1, 0), (4, 5))  # "abc", "bba", "baaa"
    request = GenerationRequest(
        request_id=RequestId("r"),
        prompt_token_ids=(0,),
        max_new_tokens=60,
        bad_words=bad_words,
        sampling=SamplingParams(**case),
    )
    sampler = SequenceSampler(request, 0, vocabulary, seed)
    text = b"a"
    for _ in range(60):
        token_id = sampler.sample(Logits(rng.normal(size=(1, len(pieces))), 4), 0).token_id
        sampler.accept(token_id)
        text += pieces[token_id]

    assert not any(word in text for word in (b"abc", b"bba", b"baaa"))
    assert len(text) > 60


def test_plain_greedy_reads_no_whole_row() -> None:
    """Greedy decoding takes the first column; so does greedy with penalties where that is proven enough."""
    row = np.zeros((1, VOCAB_SIZE))
    row[0, :4] = [9.0, 8.0, 7.0, 6.0]
    logits = Logits(row, 16)

    assert make_sampler(prompt=(100,)).sample(logits, 0).token_id == 0
    assert make_sampler(prompt=(0,), presence_penalty=5.0).sample(logits, 0).token_id == 1
    assert make_sampler(prompt=(0,), top_k=2, presence_penalty=5.0).sample(logits, 0).token_id in {1, 2}
    assert logits.num_full_rows == 0


def test_log_probs_are_the_models_own() -> None:
    """The reported log probability is before penalties and temperature."""
    row = np.random.default_rng(0).normal(size=(1, VOCAB_SIZE))
    token = make_sampler(top_k=0, temperature=5.0, presence_penalty=3.0).sample(Logits(row, 8), 0)
    expected = row[0, token.token_id] - np.log(np.exp(row[0]).sum())

    assert token.log_prob == pytest.approx(expected, abs=1e-5)


def test_the_end_id_waits_for_the_minimum() -> None:
    """The end id cannot come before min_new_tokens tokens did."""
    row = np.zeros((1, VOCAB_SIZE))
    row[0, 9] = 10.0
    sampler = make_sampler(end_id=9, min_new_tokens=2)
    tokens = []
    for _ in range(3):
        token = sampler.sample(Logits(row, 16), 0).token_id
        sampler.accept(token)
        tokens.append(token)

    assert tokens[0] != 9
    assert tokens[1] != 9
    assert tokens[2] == 9


def test_top_p_decays_and_resets() -> None:
    """top_p shrinks by its decay to its floor, and the reset token restores it."""
    sampler = make_sampler(top_k=0, top_p=0.8, top_p_decay=0.5, top_p_min=0.3, top_p_reset_id=7)
    seen = [sampler._top_p]
    for token in (1, 2, 3, 7):
        sampler.accept(token)
        seen.append(sampler._top_p)

    assert seen == pytest.approx([0.8, 0.4, 0.3, 0.3, 0.8])


def test_seeds_positions_and_sequences_draw_independently() -> None:
    """The same seed and position repeat; another position, seed or sequence index does not follow from it."""
    row = np.zeros((1, VOCAB_SIZE))
    logits = Logits(row, 16)
    first = [make_sampler(seed, top_k=0).sample(logits, 0).token_id for seed in range(30)]
    again = [make_sampler(seed, top_k=0).sample(logits, 0).token_id for seed in range(30)]
    later = []
    for seed in range(30):
        sampler = make_sampler(seed, top_k=0)
        sampler.accept(0)
        later.append(sampler.sample(logits, 0).token_id)

    assert first == again
    assert len(set(first)) > 20
    assert sum(a == b for a, b in zip(first, later, strict=True)) < 5


def test_when_everything_is_banned_the_sequence_ends_or_fails() -> None:
    """With every token at minus infinity the end id is taken; without one the request fails by name."""
    bias = np.full(VOCAB_SIZE, -np.inf, np.float32)
    logits = Logits(np.zeros((1, VOCAB_SIZE)), 16)
    for sampling in ({}, {"top_k": 0}, {"top_k": 4}):
        assert make_sampler(embedding_bias=bias, end_id=3, **sampling).sample(logits, 0).token_id == 3
        with pytest.raises(EngineFailureError, match="every token is banned"):
            make_sampler(embedding_bias=bias, **sampling).sample(logits, 0)


def test_an_end_id_that_has_to_wait_does_not_end_the_sequence() -> None:
    """Where everything is banned and the minimum length is not reached, the request fails and says why."""
    bias = np.full(VOCAB_SIZE, -np.inf, np.float32)
    sampler = make_sampler(embedding_bias=bias, end_id=3, min_new_tokens=1)

    with pytest.raises(EngineFailureError, match="the end id has to wait for the minimum length"):
        sampler.sample(Logits(np.zeros((1, VOCAB_SIZE)), 16), 0)
    sampler.accept(0)
    assert sampler.sample(Logits(np.zeros((1, VOCAB_SIZE)), 16), 0).token_id == 3


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("case", [{}, {"top_k": 4}, {"top_k": 0}], ids=str)
def test_logits_that_are_no_numbers_fail_the_request(case: dict[str, Any], value: float) -> None:
    """A broken forward pass is reported, not sampled from."""
    row = np.zeros((1, VOCAB_SIZE))
    row[0, 5] = value

    with pytest.raises(EngineFailureError, match="not finite numbers"):
        make_sampler(**case).sample(Logits(row, 16), 0)


@pytest.mark.parametrize("case", [{"top_k": 0}, {"top_k": 6, "temperature": 0.8}, {"top_k": 0, "top_p": 0.7}], ids=str)
def test_verifying_drafts_keeps_the_targets_distribution(case: dict[str, Any]) -> None:
    """Drafts from another distribution, accepted or replaced, are distributed as the target's own samples."""
    rng = np.random.default_rng(11)
    row, draft_row = rng.normal(size=VOCAB_SIZE), rng.normal(size=VOCAB_SIZE).astype(np.float32)
    row[:10] += 4.0
    draft_row[5:15] += 4.0
    params = SamplingParams(**case)
    expected = naive_distribution(row.astype(np.float32), [], params, set())
    draft_weights = np.exp(draft_row.astype(np.float64) / params.temperature)
    drafts = rng.choice(VOCAB_SIZE, size=4000, p=draft_weights / draft_weights.sum())
    logits = Logits(row[None], 32)
    drawn = [
        make_sampler(seed, **dict(case)).verify(logits, 0, int(draft), draft_row, None).token_id
        for seed, draft in enumerate(drafts)
    ]
    num_accepted = sum(token == draft for token, draft in zip(drawn, drafts, strict=True))

    assert set(drawn) <= set(expected)
    assert num_accepted > 400
    large = {token: p for token, p in expected.items() if p > 0.004}
    chi_square = sum((drawn.count(t) - p * 4000) ** 2 / (p * 4000) for t, p in large.items())
    assert chi_square < len(large) + 5 * math.sqrt(2 * len(large)) + 5
