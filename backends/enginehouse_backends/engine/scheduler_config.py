"""The limits of the planner, and the refusal of requests that no step could ever serve within them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from enginehouse_contract.errors import ConfigurationError, InvalidRequestError, refusal

if TYPE_CHECKING:
    from enginehouse_backends.engine.request import GenerationRequest


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """The limits of a step, and what to do when blocks run out (policies by TensorRT-LLM's names).

    ``guaranteed_no_evict`` starts a sequence only when all it may ever need fits beside all that the running ones may
    ever need, so none is ever paused. ``max_utilization`` starts it when its next tokens fit; when blocks run out, the
    last running sequence in order is paused and later computed again.
    """

    max_num_tokens: int  # of all sequences in one step
    max_batch_size: int  # sequences running at a time
    max_seq_len: int  # prompt + output of one sequence
    policy: Literal["guaranteed_no_evict", "max_utilization"] = "guaranteed_no_evict"
    enable_chunked_context: bool = True  # False: a prompt is computed in one step

    def __post_init__(self) -> None:
        for name in ("max_num_tokens", "max_batch_size", "max_seq_len"):
            if (value := getattr(self, name)) < 1:
                raise ConfigurationError(refusal(name, "must be at least 1", given=value))

    def check(self, request: GenerationRequest, num_pool_tokens: int) -> None:
        """Raise :class:`InvalidRequestError` when *request* could never be served with a KV cache of that size."""
        num_prompt_tokens = len(request.prompt_token_ids)
        if num_prompt_tokens < 1:
            raise InvalidRequestError(refusal("input_ids", "is empty", hint="Send at least one token."))
        if request.max_new_tokens < 1:
            raise InvalidRequestError(refusal("request_output_len", "must be at least 1", given=request.max_new_tokens))
        if not self.enable_chunked_context and num_prompt_tokens > self.max_num_tokens:
            msg = refusal(
                "input_ids",
                "is longer than one step may be, and `enable_chunked_context` is off",
                limit=self.max_num_tokens,
                given=num_prompt_tokens,
                hint="Send a shorter prompt.",
            )
            raise InvalidRequestError(msg)
        # The last token generated is never fed to the model and needs no slot of the cache.
        for limit, name in ((self.max_seq_len, "`max_seq_len`"), (num_pool_tokens + 1, "the KV cache")):
            if num_prompt_tokens + request.max_new_tokens > limit:
                msg = refusal(
                    "request_output_len",
                    f"does not fit into {name} of {limit} tokens behind a prompt of {num_prompt_tokens}",
                    limit=max(0, limit - num_prompt_tokens),
                    given=request.max_new_tokens,
                    hint="Ask for fewer tokens or send a shorter prompt.",
                )
                raise InvalidRequestError(msg)
