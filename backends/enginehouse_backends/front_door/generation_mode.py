"""How a row is generated: plainly, with drafts made inside the engine, or in rounds driven from here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from enginehouse_backends.front_door.draft_target import DraftModelSource, NgramSource, generate_with_drafts
from enginehouse_backends.front_door.engine_client import generate
from enginehouse_backends.triton.engine_request import PRIORITY_PARAMETER, SPECULATE_PARAMETER
from enginehouse_contract.errors import InvalidRequestError, UnsupportedFeatureError, refusal

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray

    from enginehouse_backends.front_door.door import Job
    from enginehouse_backends.front_door.draft_target import DraftSource
    from enginehouse_backends.front_door.engine_client import CallEngine, EngineDelta

DEFAULT_NUM_DRAFT_TOKENS: Final = 5

_DRAFT_SAMPLING: Final = frozenset(
    {
        "runtime_top_k",
        "runtime_top_p",
        "temperature",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "seed",
        "random_seed",
    }
)
"""Sampling inputs that the draft model shares with the target; the closer the two, the more drafts are accepted."""


def open_deltas(
    call_engine: CallEngine, job: Job, inputs: Mapping[str, NDArray[Any]], end_id: int | None
) -> Iterator[EngineDelta]:
    """Start generating a row.

    `speculate` = ngram asks the engine for drafts of its own, or, with `num_draft_tokens`, drives them from here, which
    works on any engine that verifies drafts. `draft`, or `num_draft_tokens` alone where a draft model is configured (as
    NVIDIA's model does), drafts with the second engine. Raises :class:`InvalidRequestError` when that cannot be done.
    """
    row = job.row
    parameters: dict[str, Any] = {PRIORITY_PARAMETER: row.priority}
    source = _draft_source(call_engine, job, inputs)
    if source is None:
        if row.speculate is not None:
            parameters[SPECULATE_PARAMETER] = row.speculate
        return generate(
            call_engine,
            job.route.engine_model,
            inputs,
            request_id=job.engine_request_id,
            parameters=parameters,
        )
    if row.num_sequences > 1:
        msg = refusal("num_return_sequences", "above 1 is not supported in rounds of drafts", given=row.num_sequences)
        raise UnsupportedFeatureError(msg)
    return generate_with_drafts(
        call_engine,
        job.route.engine_model,
        inputs,
        source,
        max_tokens=row.max_tokens,
        num_draft_tokens=row.num_draft_tokens or DEFAULT_NUM_DRAFT_TOKENS,
        end_id=end_id,
        request_id=job.engine_request_id,
        parameters={**parameters, SPECULATE_PARAMETER: "off"},
        is_wanted=lambda: job.end_reason is None,
    )


def _draft_source(call_engine: CallEngine, job: Job, inputs: Mapping[str, NDArray[Any]]) -> DraftSource | None:
    """Who drafts from here, or None where nobody does."""
    row, draft_model = job.row, job.route.draft_model
    if row.speculate == "ngram":
        return NgramSource() if row.num_draft_tokens else None
    if row.speculate == "draft" and draft_model is None:
        msg = refusal("speculate", "cannot be draft: no draft model is served (`tensorrt_llm_draft_model_name`)")
        raise InvalidRequestError(msg)
    if draft_model is None or row.speculate == "off" or (row.speculate is None and not row.num_draft_tokens):
        return None
    return DraftModelSource(
        call_engine,
        draft_model,
        {name: value for name, value in inputs.items() if name in _DRAFT_SAMPLING},
        request_id=job.engine_request_id,
        with_logits=row.use_draft_logits,
    )
