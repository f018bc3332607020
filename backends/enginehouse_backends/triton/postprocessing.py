"""The ``postprocessing`` model: token ids to text, each response on its own.

Drop-in for NVIDIA's model of the same name. It keeps no state between the responses of a stream: tokens become their
exact bytes, so no space is lost, and our engine cuts its deltas at character boundaries, so no character is split. (An
engine that does not, NVIDIA's, may still split one here; the front door does not.) One instance keeps the order.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from enginehouse_backends.tokenization.detokenizer import decode_tokens
from enginehouse_backends.tokenization.tokenizer import load_tokenizer
from enginehouse_backends.triton import fence
from enginehouse_backends.triton.model_parameters import ModelParameters
from enginehouse_contract.errors import InvalidRequestError, refusal
from enginehouse_contract.model_config import ENGINEHOUSE_PARAMETERS
from enginehouse_contract.tensors import POSTPROCESSING

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from enginehouse_backends.tokenization.vocabulary import Vocabulary


class TritonPythonModel:
    """Decodes each request; a refused one answers its error and leaves the others alone."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the vocabulary."""
        fence.route_logging_to_server()
        parameters = ModelParameters.from_model_config(args["model_config"])
        parameters.check_names((*POSTPROCESSING.parameters, *ENGINEHOUSE_PARAMETERS))
        self._vocabulary = load_tokenizer(Path(parameters.required("tokenizer_dir"))).vocabulary
        self._skip_special_tokens = parameters.flag("skip_special_tokens", default=True)

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answer every request with its text or its error."""
        return [self._answer(request) for request in requests]

    def _answer(self, request: Any) -> Any:
        try:
            inputs = fence.read_inputs(request, POSTPROCESSING.inputs)
            text = decode_batch(
                self._vocabulary,
                inputs["TOKENS_BATCH"],
                inputs["SEQUENCE_LENGTH"],
                skip_special_tokens=self._skip_special_tokens,
            )
            return fence.make_response({"OUTPUT": text}, request.requested_output_names())
        except Exception as error:  # noqa: BLE001 - every request must be answered, whatever went wrong
            return fence.make_error_response(error)


def decode_batch(
    vocabulary: Vocabulary, token_ids: NDArray[Any], lengths: NDArray[Any], *, skip_special_tokens: bool
) -> NDArray[np.object_]:
    """Decode [batch, beams, length] token ids, cut to [batch, beams] lengths, into [batch, beams] UTF-8 bytes.

    Raises :class:`InvalidRequestError` for a length beyond the row and for an id outside the vocabulary; -1 is padding.
    """
    if token_ids.shape[:2] != lengths.shape:
        raise InvalidRequestError(
            refusal("SEQUENCE_LENGTH", "must hold one length per beam", limit=token_ids.shape[:2], given=lengths.shape)
        )
    texts = np.empty(lengths.shape, np.object_)
    for batch, beam in np.ndindex(*lengths.shape):
        length = int(lengths[batch, beam])
        if not 0 <= length <= token_ids.shape[2]:
            raise InvalidRequestError(
                refusal("SEQUENCE_LENGTH", "lies outside the row", limit=token_ids.shape[2], given=length)
            )
        row = [int(token_id) for token_id in token_ids[batch, beam, :length] if token_id != -1]
        if row and not 0 <= min(row) <= max(row) < vocabulary.size:
            raise InvalidRequestError(
                refusal("TOKENS_BATCH", "holds an id outside the vocabulary", limit=f"0 to {vocabulary.size - 1}")
            )
        texts[batch, beam] = decode_tokens(vocabulary, row, skip_special_tokens=skip_special_tokens).encode()
    return texts
