"""Speculative decoding across engine calls: drafts from anywhere, verified by a target engine through the contract.

::

    context = prompt
    until the end:   drafts = source.draft(context, n)
                     target(input_ids=context, draft_input_ids=drafts, request_output_len=n + 1) -> accepted + 1 more
                     context += what came

Leviathan et al. 2023. Works on any engine that takes `draft_input_ids`: NVIDIA's, built with draft_tokens_external, and
ours. With prefix reuse on, no round recomputes the context. Unlike the original template's loop it streams each round,
keeps every round's counts, honours limits and stops, and gives each round its own seed: re-sending one seed would
repeat its random numbers every round.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from enginehouse_backends.front_door.engine_client import EngineDelta, prompt_inputs, read_delta
from enginehouse_backends.speculation.ngram import NgramProposer
from enginehouse_contract.tensors import ENGINE_USAGE_NAMES, PERF_METRIC_NAMES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from numpy.typing import NDArray

    from enginehouse_backends.front_door.engine_client import CallEngine

    Tensors = Mapping[str, NDArray[Any]]

_ROUND_OUTPUTS = (
    "output_ids",
    "sequence_length",
    "cum_log_probs",
    "output_log_probs",
    "generation_logits",
    *(name for name in PERF_METRIC_NAMES if name != "acceptance_rate"),
    *ENGINE_USAGE_NAMES,
)
_MACHINE_NAMES = ("machine_time_ns", "energy_uj", "is_energy_estimated")


@dataclass(frozen=True, slots=True)
class Draft:
    """Proposed tokens and, where the target is to compare distributions, the logits they came from, [n, vocab].

    ``metrics`` hold the drafting engine's part of the machine, where one drafted.
    """

    token_ids: tuple[int, ...]
    logits: NDArray[np.float32] | None = None
    metrics: Mapping[str, NDArray[Any]] = field(default_factory=dict)


class DraftSource(Protocol):
    """Proposes what may come next."""

    def draft(self, context: list[int], max_tokens: int) -> Draft:
        """Return up to *max_tokens* drafts for what follows *context*."""
        ...


class NgramSource:
    """Prompt lookup over the context; each call reads only what is new since the last."""

    def __init__(self) -> None:
        self._proposer = NgramProposer()
        self._num_read = 0

    def draft(self, context: list[int], max_tokens: int) -> Draft:
        """Return what followed the last time the context's last tokens were seen."""
        self._proposer.extend(context[self._num_read :])
        self._num_read = len(context)
        return Draft(self._proposer.propose(max_tokens))


class DraftModelSource:
    """A smaller engine model of the same vocabulary."""

    def __init__(
        self, call_engine: CallEngine, model_name: str, sampling: Tensors, *, request_id: str, with_logits: bool
    ) -> None:
        self._call_engine = call_engine
        self._model_name = model_name
        self._sampling = sampling
        self._request_id = request_id
        self._with_logits = with_logits

    def draft(self, context: list[int], max_tokens: int) -> Draft:
        """Generate exactly *max_tokens* tokens: the draft model may not end where the target would not."""
        asked = {
            **self._sampling,
            **prompt_inputs(context, max_tokens),
            "min_tokens": np.array([[max_tokens]], np.int32),
            "exclude_input_in_output": np.array([[True]]),
            "return_perf_metrics": np.array([[True]]),
            **_seed(self._sampling, len(context), "draft"),
        }
        outputs = ["output_ids", "sequence_length", *_MACHINE_NAMES]
        if self._with_logits:
            asked["return_generation_logits"] = np.array([[True]])
            outputs.append("generation_logits")
        token_ids: tuple[int, ...] = ()
        logits: NDArray[np.float32] | None = None
        metrics: Tensors = {}
        for response in self._call_engine(self._model_name, asked, outputs, request_id=self._request_id):
            delta = read_delta(response)
            token_ids += delta.token_ids
            if "generation_logits" in delta.logits:
                logits = delta.logits["generation_logits"].reshape(len(token_ids), -1)
            metrics = delta.metrics or metrics
        return Draft(token_ids, logits, metrics)


def generate_with_drafts(
    call_engine: CallEngine,
    model_name: str,
    inputs: Tensors,
    source: DraftSource,
    *,
    max_tokens: int,
    num_draft_tokens: int,
    end_id: int | None,
    request_id: str,
    parameters: Mapping[str, Any],
    is_wanted: Callable[[], bool] = lambda: True,
) -> Iterator[EngineDelta]:
    """Yield one delta per round, the last with metrics summed over all rounds. One sequence.

    *is_wanted* is asked between rounds, when no engine call is in flight that could be stopped.
    """
    length = int(inputs["input_lengths"].reshape(-1)[0])
    context: list[int] = inputs["input_ids"].reshape(-1)[:length].tolist()
    min_tokens = _scalar(inputs, "min_tokens", _scalar(inputs, "min_length", 0))
    totals = _RoundTotals()
    num_tokens, cum_log_prob = 0, 0.0
    while True:
        num_drafts = min(num_draft_tokens, max_tokens - num_tokens - 1)
        draft = source.draft(context, num_drafts) if num_drafts > 0 else Draft(())
        asked = {
            **{name: value for name, value in inputs.items() if name not in {"min_length", "random_seed"}},
            **prompt_inputs(context, len(draft.token_ids) + 1),
            "min_tokens": np.array([[min(max(0, min_tokens - num_tokens), len(draft.token_ids) + 1)]], np.int32),
            "exclude_input_in_output": np.array([[True]]),
            "return_perf_metrics": np.array([[True]]),
            **_seed(inputs, num_tokens, "target"),
        }
        if draft.token_ids:
            asked["draft_input_ids"] = np.array([draft.token_ids], np.int32)
        if draft.logits is not None:
            asked["draft_logits"] = draft.logits[None]
        token_ids: tuple[int, ...] = ()
        totals.add_draft(draft.metrics)
        for response in call_engine(model_name, asked, _ROUND_OUTPUTS, request_id=request_id, parameters=parameters):
            delta = read_delta(response)
            token_ids += delta.token_ids
            if delta.metrics:
                totals.add_round(delta.metrics, len(context))
        context.extend(token_ids)
        num_tokens += len(token_ids)
        cum_log_prob += delta.cum_log_prob or 0.0
        is_last = (
            not token_ids
            or not is_wanted()
            or num_tokens >= max_tokens
            or (token_ids[-1] == end_id and num_tokens >= min_tokens)
        )
        yield EngineDelta(
            sequence_index=0,
            token_ids=token_ids,
            log_probs=delta.log_probs,
            cum_log_prob=cum_log_prob,
            metrics=totals.metrics() if is_last else None,
            logits=delta.logits,
        )
        if is_last:
            return


class _RoundTotals:
    """Adds up what the rounds report: drafts, machine time and recomputed tokens of all, the rest of the first."""

    def __init__(self) -> None:
        self._first: dict[str, NDArray[Any]] = {}
        self._last: dict[str, NDArray[Any]] = {}
        self._num_drafts = 0
        self._num_accepted = 0
        self._num_recomputed = 0
        self._machine: dict[str, int] = {}

    def add_draft(self, metrics: Tensors) -> None:
        """Add the drafting engine's part of the machine."""
        for name in _MACHINE_NAMES:
            if name in metrics:
                self._machine[name] = self._machine.get(name, 0) + _scalar(metrics, name, 0)

    def add_round(self, metrics: Tensors, num_context_tokens: int) -> None:
        """Add a round of the target, whose prompt was the context so far."""
        self.add_draft(metrics)
        self._num_drafts += _scalar(metrics, "total_draft_tokens", 0)
        self._num_accepted += _scalar(metrics, "total_accepted_draft_tokens", 0)
        self._num_recomputed += _scalar(metrics, "num_recomputed_tokens", 0)
        if self._first:
            # Of a later round's context only its last token is new to the engine.
            num_cached = _scalar(metrics, "num_cached_input_tokens", num_context_tokens - 1)
            self._num_recomputed += max(0, num_context_tokens - num_cached - 1)
        self._first = self._first or dict(metrics)
        self._last = dict(metrics)

    def metrics(self) -> dict[str, NDArray[Any]]:
        """Return the sums, shaped as one call's metrics are."""
        rate = self._num_accepted / self._num_drafts if self._num_drafts else 0.0
        last_token = {name: self._last[name] for name in ("last_token_time_ns",) if name in self._last}
        machine = {
            name: np.array([[total]], np.int64 if name != "is_energy_estimated" else np.bool_)
            for name, total in self._machine.items()
        }
        return {
            **self._first,
            **last_token,
            **machine,
            "num_recomputed_tokens": np.array([[self._num_recomputed]], np.int32),
            "total_draft_tokens": np.array([[self._num_drafts]], np.int32),
            "total_accepted_draft_tokens": np.array([[self._num_accepted]], np.int32),
            "acceptance_rate": np.array([[rate]], np.float32),
        }


def _scalar(tensors: Tensors, name: str, default: int) -> int:
    return int(tensors[name].reshape(-1)[0]) if name in tensors else default


def _seed(inputs: Tensors, num_tokens: int, who: str) -> dict[str, NDArray[np.uint64]]:
    """A seed of its own for this round, from the request's; none where the request has none."""
    given = inputs.get("seed", inputs.get("random_seed"))
    if given is None:
        return {}
    digest = hashlib.sha256(f"{int(given.reshape(-1)[0])}/{who}/{num_tokens}".encode()).digest()
    return {"seed": np.array([[int.from_bytes(digest[:8], "big")]], np.uint64)}
