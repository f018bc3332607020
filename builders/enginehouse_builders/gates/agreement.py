"""The numeric gate where engines give no logits: tokens alone.

A TensorRT-LLM engine gives the logits of a prompt only when it was built with ``gather_context_logits``, which costs
memory, and the LLM API's model gives none. Each of the reference's answer tokens is then asked of the build, one
request for each, from the reference's own prefix; KL divergence and perplexity are not known.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from enginehouse_builders.gates.asking import answered, in_parallel
from enginehouse_builders.gates.record import GateResult

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from enginehouse_builders.gates.divergence import ScoredSequence
    from enginehouse_builders.gates.record import Value
    from enginehouse_builders.gates.services import EngineService
    from enginehouse_builders.gates.tokenizers import EncodedPrompt
    from enginehouse_builders.spec.model import NumericGate
    from enginehouse_contract.manifest import Manifest


def gives_logits(manifest: Manifest, config: dict[str, Any]) -> bool:
    """Return whether a build's engine gives the logits of prompts, by its own record."""
    return manifest.target == "cpu" or bool(config.get("build_config", {}).get("gather_context_logits"))


def agreement_gate(
    open_build: Callable[[], EngineService],
    open_reference: Callable[[], EngineService] | None,
    prompt_sets: Mapping[str, Sequence[EncodedPrompt]],
    limits: NumericGate,
) -> GateResult:
    """Compare tokens over sets of prompts, each of which must pass. Raises errors of our tree when an engine fails."""
    note = "no logits (gather_context_logits), so KL divergence and perplexity were not compared"
    thresholds: dict[str, Value] = {"min_token_agreement": limits.min_token_agreement}
    if open_reference is None:
        return GateResult("numeric", "skipped", f"no reference and {note}: nothing to judge by", {}, thresholds)
    reference = open_reference()
    sequences = {
        name: in_parallel(lambda prompt: answered(reference, prompt), prompts) for name, prompts in prompt_sets.items()
    }
    build = open_build()
    numbers: dict[str, Value] = {}
    failures = []
    for name, part in sequences.items():
        num_agreeing = sum(in_parallel(lambda sequence: _num_agreeing(build, sequence), part))
        num_tokens = sum(sequence.num_answer_tokens for sequence in part)
        share = num_agreeing / num_tokens
        prefix = "" if name == "shipped" else f"{name}_"
        numbers |= {f"{prefix}token_agreement": share, f"{prefix}num_answer_tokens": num_tokens}
        if share < limits.min_token_agreement:
            failures.append(
                f"tokens agree in {share:.1%} over the {name} prompts, at least {limits.min_token_agreement:.1%} must"
            )
    reason = "; ".join(failures) or f"tokens agree with the reference; {note}"
    return GateResult("numeric", "failed" if failures else "passed", reason, numbers, thresholds)


def _num_agreeing(build: EngineService, sequence: ScoredSequence) -> int:
    ids, num_agreeing = sequence.token_ids, 0
    for position in range(sequence.num_prompt_tokens, len(ids)):
        new = [token for tokens in build.stream(ids[:position], 1) for token in tokens]
        num_agreeing += new == [ids[position]]
    return num_agreeing
