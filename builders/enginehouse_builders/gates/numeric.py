"""The numeric gate: does the build still say what its reference says?

Both builds are asked through the server. The reference answers every prompt greedily; then both give the logits at
every position of prompt and answer, so each token is predicted from the same prefix. The reference's logits wait on
disk, so that a host with room for one build can compare two.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from enginehouse_builders.gates.asking import answered, in_parallel
from enginehouse_builders.gates.divergence import Divergence, ScoredSequence, compare, first_bad_position
from enginehouse_builders.gates.record import GateResult

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from enginehouse_builders.gates.record import Value
    from enginehouse_builders.gates.services import EngineService
    from enginehouse_builders.gates.tokenizers import EncodedPrompt
    from enginehouse_builders.spec.model import NumericGate

    OpenService = Callable[[], EngineService]

MAX_PROMPT_TOKENS: Final = 1024  # of a prompt's beginning: logits of more would not fit one message


def numeric_gate(
    open_build: OpenService,
    open_reference: OpenService | None,
    prompt_sets: Mapping[str, Sequence[EncodedPrompt]],
    limits: NumericGate,
    scratch: Path,
) -> GateResult:
    """Compare a build with its reference over sets of prompts, each of which must pass; *scratch* is an empty folder.

    Without a reference only what needs none is checked: finite logits, and text predicted better than by guessing.
    Raises errors of our tree when an engine fails.
    """
    answering = (open_reference or open_build)()
    questions = [(name, prompt) for name, prompts in prompt_sets.items() for prompt in prompts]
    sequences = in_parallel(lambda item: answered(answering, item[1]), questions)
    if open_reference is not None:
        in_parallel(lambda item: _save(scratch, item[0], answering, item[1]), list(enumerate(sequences)))
    build = open_build()
    vocab_sizes: set[int] = set()

    def score(item: tuple[int, ScoredSequence]) -> Divergence | str:
        logits = build.context_logits(item[1].token_ids)
        vocab_sizes.add(logits.shape[-1])
        reference = None if open_reference is None else np.load(_logits_file(scratch, item[0]))
        return _compare_checked(item[1], logits, reference)

    by_set: dict[str, Divergence] = dict.fromkeys(prompt_sets, Divergence())
    worst_kl, worst_prompt = -1.0, ""
    for (name, prompt), found in zip(questions, in_parallel(score, list(enumerate(sequences))), strict=True):
        if isinstance(found, str):
            return GateResult("numeric", "failed", f"{found} (the prompt at {prompt.where})", {}, limits.model_dump())
        by_set[name] += found
        if found.mean_kl > worst_kl:
            worst_kl, worst_prompt = found.mean_kl, prompt.where
    numbers = {
        key: value
        for name, found in by_set.items()
        for key, value in _numbers(name, found, has_reference=open_reference is not None).items()
    }
    if open_reference is None:
        return _without_reference(by_set, max(vocab_sizes), numbers)
    failures = [failure for name, found in by_set.items() for failure in _failures(name, found, limits)]
    reason = "; ".join(failures) or "agrees with the reference"
    numbers |= {"worst_prompt": worst_prompt, "worst_prompt_mean_kl_divergence": worst_kl}
    return GateResult("numeric", "failed" if failures else "passed", reason, numbers, limits.model_dump())


def _without_reference(by_set: Mapping[str, Divergence], vocab_size: int, numbers: dict[str, Value]) -> GateResult:
    """Judge a build alone: text must be less of a surprise to it than to one who knows nothing but the vocabulary."""
    thresholds: dict[str, Value] = {"max_perplexity": vocab_size}
    for name, found in by_set.items():
        if found.perplexity is not None and found.perplexity > vocab_size:
            reason = (
                f"it predicts the {name} prompts worse than guessing: perplexity {found.perplexity:.4g} with a "
                f"vocabulary of {vocab_size} tokens"
            )
            return GateResult("numeric", "failed", reason, numbers, thresholds)
    return GateResult("numeric", "passed", "no reference: finite, and better than guessing", numbers, thresholds)


def _save(scratch: Path, index: int, service: EngineService, sequence: ScoredSequence) -> None:
    np.save(_logits_file(scratch, index), service.context_logits(sequence.token_ids))


def _logits_file(scratch: Path, index: int) -> Path:
    return scratch / f"{index}.npy"


def _compare_checked(
    sequence: ScoredSequence, build: NDArray[np.float32], reference: NDArray[np.float32] | None
) -> Divergence | str:
    """Return the divergence, or in words why there is none."""
    for logits, whose in ((build, "this build"), (reference, "the reference")):
        if logits is None:
            continue
        if logits.shape[0] != len(sequence.token_ids):
            return f"{whose} answered logits of {logits.shape[0]} positions for {len(sequence.token_ids)} tokens"
        position = first_bad_position(logits)
        if position is not None:
            return f"logits of {whose} are NaN or infinite at position {position}"
    if reference is not None and reference.shape != build.shape:
        sizes = f"{build.shape[1]} tokens, the reference's {reference.shape[1]}"
        return f"the builds cannot be compared: this one's vocabulary has {sizes}"
    return compare(sequence, build, reference)


def _numbers(name: str, found: Divergence, *, has_reference: bool) -> dict[str, Value]:
    prefix = "" if name == "shipped" else f"{name}_"
    own: dict[str, Value] = {"num_positions": found.num_positions, "perplexity": found.perplexity}
    if has_reference:
        own |= {
            "token_agreement": found.token_agreement,
            "num_answer_tokens": found.num_answer_tokens,
            "mean_kl_divergence": found.mean_kl,
            "max_kl_divergence": found.max_kl,
            "reference_perplexity": found.reference_perplexity,
            "perplexity_ratio": _perplexity_ratio(found),
        }
    return {prefix + key: value for key, value in own.items()}


def _perplexity_ratio(found: Divergence) -> float | None:
    if found.perplexity is None or found.reference_perplexity is None:
        return None
    return found.perplexity / found.reference_perplexity


def _failures(name: str, found: Divergence, limits: NumericGate) -> list[str]:
    over = f" over the {name} prompts"
    failures = []
    if found.token_agreement < limits.min_token_agreement:
        failures.append(
            f"tokens agree in {found.token_agreement:.1%}{over}, at least {limits.min_token_agreement:.1%} must"
        )
    if found.mean_kl > limits.max_mean_kl_divergence:
        failures.append(
            f"the mean KL divergence{over} is {found.mean_kl:.4f} nats, "
            f"at most {limits.max_mean_kl_divergence:g} may be"
        )
    ratio = _perplexity_ratio(found)
    if ratio is not None and ratio > limits.max_perplexity_ratio:
        failures.append(
            f"the perplexity{over} is {ratio:.4g} times the reference's, at most {limits.max_perplexity_ratio:g} may be"
        )
    return failures
