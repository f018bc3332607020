"""The ``preprocessing`` model: text (or chat messages) to token ids, within the engine's limits.

Drop-in for NVIDIA's model of the same name. Only outputs that a request gives rise to are made: Triton hands a missing
output on as an absent optional input, so a decoder-only engine never sees decoder or prompt-table tensors.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from enginehouse_backends.tokenization.chat import parse_messages, render_chat
from enginehouse_backends.tokenization.tokenizer import load_tokenizer
from enginehouse_backends.tokenization.word_lists import encode_word_list, tokenize_words
from enginehouse_backends.triton import fence
from enginehouse_backends.triton.model_parameters import ModelParameters
from enginehouse_contract.errors import ConfigurationError, InvalidRequestError, UnsupportedFeatureError, refusal
from enginehouse_contract.manifest import CONFIG_FILE
from enginehouse_contract.model_config import ENGINEHOUSE_PARAMETERS
from enginehouse_contract.support import REFUSED_PREPROCESSING_INPUTS
from enginehouse_contract.tensors import PREPROCESSING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from enginehouse_backends.tokenization.tokenizer import Tokenizer

    Arrays = Mapping[str, NDArray[Any]]

INPUT_FORMAT_PARAMETER = "input_format"
"""Request parameter: `text` (default), or `messages` for a JSON list of chat messages in QUERY."""


class TritonPythonModel:
    """Tokenizes each request; a refused one answers its error and leaves the others alone."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the tokenizer and read the engine's limits."""
        fence.route_logging_to_server()
        parameters = ModelParameters.from_model_config(args["model_config"])
        parameters.check_names((*PREPROCESSING.parameters, *ENGINEHOUSE_PARAMETERS))
        for name in ("multimodal_model_path", "max_num_images"):
            if name in parameters:
                raise ConfigurationError(
                    refusal(name, "cannot be set: image input is not served", given=parameters.text(name))
                )
        self._preprocessor = Preprocessor(
            load_tokenizer(Path(parameters.required("tokenizer_dir"))),
            *read_engine_limits(Path(parameters.required("gpt_model_path"))),
            add_special_tokens=parameters.flag("add_special_tokens", default=True),
        )

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answer every request with its tensors or its error."""
        return [self._answer(request) for request in requests]

    def _answer(self, request: Any) -> Any:
        try:
            inputs = fence.read_inputs(request, PREPROCESSING.inputs)
            outputs = self._preprocessor.process(inputs, fence.read_parameters(request))
            return fence.make_response(outputs, request.requested_output_names())
        except Exception as error:  # noqa: BLE001 - every request must be answered, whatever went wrong
            return fence.make_error_response(error)


def read_engine_limits(engine_dir: Path) -> tuple[int, int]:
    """Return (max_input_len, vocab_size) from an engine folder's ``config.json``, TensorRT-LLM's or ours."""
    try:
        config = json.loads((engine_dir / CONFIG_FILE).read_text(encoding="utf-8"))
        return int(config["build_config"]["max_input_len"]), int(config["pretrained_config"]["vocab_size"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        msg = refusal("gpt_model_path", f"holds no readable {CONFIG_FILE} ({error})", given=str(engine_dir))
        raise ConfigurationError(msg) from error


class Preprocessor:
    """The model without Triton: arrays in, arrays out."""

    def __init__(self, tokenizer: Tokenizer, max_input_len: int, vocab_size: int, *, add_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._max_input_len = max_input_len
        self._vocab_size = vocab_size
        self._add_special_tokens = add_special_tokens

    def process(self, inputs: Arrays, parameters: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
        """Tokenize one request of any number of rows; shapes as the contract says, with the batch dimension.

        Raises :class:`InvalidRequestError` (or its UNSUPPORTED child) naming the field, the limit and the value given.
        """
        for name, reason in REFUSED_PREPROCESSING_INPUTS.items():
            if name in inputs:
                raise UnsupportedFeatureError(refusal(name, f"is not supported: {reason}", hint="Leave it out."))
        queries = [_text_bytes(row) for row in inputs["QUERY"].reshape(-1)]
        output_lens = inputs["REQUEST_OUTPUT_LEN"].astype(np.int32).reshape(len(queries), -1)
        rows = [self._encode(query, parameters) for query in queries]
        pad_id = self._tokenizer.pad_id if self._tokenizer.pad_id is not None else 0
        end_id = self._tokenizer.eos_id if self._tokenizer.eos_id is not None else -1
        outputs: dict[str, NDArray[Any]] = {
            "INPUT_ID": _pad(rows, pad_id),
            "REQUEST_INPUT_LEN": np.array([[len(row)] for row in rows], np.int32),
            "REQUEST_OUTPUT_LEN": output_lens,
            "OUT_END_ID": inputs.get("END_ID", np.full((len(rows), 1), end_id, np.int32)),
            "OUT_PAD_ID": inputs.get("PAD_ID", np.full((len(rows), 1), pad_id, np.int32)),
        }
        for source, target in (("STOP_WORDS_DICT", "STOP_WORDS_IDS"), ("BAD_WORDS_DICT", "BAD_WORDS_IDS")):
            if source in inputs:
                outputs[target] = self._word_lists(source, inputs[source])
        if "EMBEDDING_BIAS_WORDS" in inputs or "EMBEDDING_BIAS_WEIGHTS" in inputs:
            outputs["EMBEDDING_BIAS"] = self._embedding_bias(inputs, len(rows))
        if "PROMPT_TABLE_EXTRA_ID" in inputs:
            ids = inputs["PROMPT_TABLE_EXTRA_ID"].reshape(-1, 1)
            width = outputs["INPUT_ID"].shape[1]
            outputs["OUT_PROMPT_TABLE_EXTRA_IDS"] = np.repeat(ids, width, axis=1)
        return outputs

    def encode_text(self, text: str | bytes) -> list[int]:
        """Tokenize a prompt; one that is too long is refused with the limit and its own length."""
        return self._tokenizer.encode_prompt(text, self._max_input_len, add_special_tokens=self._add_special_tokens)

    def encode_messages(self, messages: str | bytes) -> list[int]:
        """Render chat messages (JSON) through the model's template and tokenize them."""
        text = render_chat(self._tokenizer, parse_messages(messages))
        return self._tokenizer.encode_prompt(text, self._max_input_len, add_special_tokens=False)

    def _encode(self, query: bytes, parameters: Mapping[str, Any]) -> list[int]:
        input_format = parameters.get(INPUT_FORMAT_PARAMETER, "text")
        if input_format == "text":
            return self._tokenizer.encode_prompt(
                query, self._max_input_len, add_special_tokens=self._add_special_tokens
            )
        if input_format == "messages":
            text = render_chat(self._tokenizer, parse_messages(query))
            return self._tokenizer.encode_prompt(text, self._max_input_len, add_special_tokens=False)
        raise InvalidRequestError(refusal(INPUT_FORMAT_PARAMETER, "must be text or messages", given=input_format))

    def _word_lists(self, name: str, words: NDArray[Any]) -> NDArray[np.int32]:
        lists = [
            encode_word_list(tokenize_words(self._tokenizer, [_text_bytes(word) for word in row.reshape(-1)], name))
            for row in words
        ]
        width = max(words.shape[1] for words in lists)
        padded = np.full((len(lists), 2, width), -1, np.int32)
        padded[:, 0] = 0
        for row, encoded in enumerate(lists):
            padded[row, :, : encoded.shape[1]] = encoded
        return padded

    def _embedding_bias(self, inputs: Arrays, num_rows: int) -> NDArray[np.float32]:
        words, weights = inputs.get("EMBEDDING_BIAS_WORDS"), inputs.get("EMBEDDING_BIAS_WEIGHTS")
        if words is None or weights is None or words.shape != weights.shape:
            msg = refusal(
                "EMBEDDING_BIAS_WORDS", "and `EMBEDDING_BIAS_WEIGHTS` must be sent together, one weight per word"
            )
            raise InvalidRequestError(msg)
        return np.stack(
            [
                self.embedding_bias(
                    [_text_bytes(word) for word in words[row].reshape(-1)],
                    weights[row].reshape(-1),
                    "EMBEDDING_BIAS_WORDS",
                )
                for row in range(num_rows)
            ]
        )

    def embedding_bias(self, words: Sequence[bytes], weights: Sequence[float], name: str) -> NDArray[np.float32]:
        """Return the bias of one row, [vocab]: each word's weight on each of its tokens."""
        tokens_of_words = tokenize_words(self._tokenizer, words, name)
        if len(tokens_of_words) != len(words):
            raise InvalidRequestError(refusal(name, "holds an empty word"))
        bias = np.zeros(self._vocab_size, np.float32)
        for token_ids, weight in zip(tokens_of_words, weights, strict=True):
            bias[list(token_ids)] += weight
        return bias


def _text_bytes(value: Any) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode()


def _pad(rows: Sequence[Sequence[int]], pad_id: int) -> NDArray[np.int32]:
    padded = np.full((len(rows), max(len(row) for row in rows)), pad_id, np.int32)
    for index, row in enumerate(rows):
        padded[index, : len(row)] = row
    return padded
