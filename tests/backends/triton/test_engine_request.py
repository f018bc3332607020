"""From engine tensors to generation requests: every input read or refused by name, every limit stated."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from enginehouse_backends.triton.engine_request import EngineRow, RequestLimits, is_stop_request, parse_engine_request
from enginehouse_backends.triton.fence import NUMPY_TYPES
from enginehouse_contract.errors import InvalidRequestError, UnsupportedFeatureError
from enginehouse_contract.support import INERT_INPUTS, REFUSED_INPUTS
from enginehouse_contract.tensors import RENAMED_INPUTS, TENSORRT_LLM

LIMITS = RequestLimits(vocab_size=100, max_input_len=40, max_seq_len=64, max_batch_size=8)


def make_inputs(num_rows: int = 1, **changes: Any) -> dict[str, np.ndarray]:
    """Return the arrays of a good request, with scalars given once for every row and None removing one."""
    values: dict[str, Any] = {"input_ids": [5, 6, 7], "input_lengths": 3, "request_output_len": 4, **changes}
    inputs = {}
    for name, value in values.items():
        if value is None:
            continue
        tensor = TENSORRT_LLM.input(name)
        array = np.array(value, NUMPY_TYPES[tensor.data_type])
        inputs[name] = np.stack([array] * num_rows)
    return inputs


def parse(num_rows: int = 1, parameters: dict[str, Any] | None = None, **changes: Any) -> list[EngineRow]:
    """Parse a good request with *changes*."""
    return parse_engine_request(
        make_inputs(num_rows, **changes), parameters or {}, LIMITS, request_id="r", arrival_time_ns=7
    )


def test_a_plain_request_decodes_greedily() -> None:
    """Without top_k and top_p decoding is greedy, as TensorRT-LLM does, and nothing else is changed."""
    (row,) = parse()

    assert row.generation.prompt_token_ids == (5, 6, 7)
    assert row.generation.max_new_tokens == 4
    assert row.generation.sampling.is_greedy
    assert row.generation.end_id is None
    assert row.generation.arrival_time_ns == 7
    assert not row.report.streaming


def test_every_input_of_the_contract_is_honoured_refused_or_inert() -> None:
    """No input is silently dropped: sending it changes the request, is refused by name, or is inert."""
    samples: dict[str, Any] = {
        "num_return_sequences": 2,
        "end_id": 9,
        "stop_words_list": [[8], [1]],
        "bad_words_list": [[8], [1]],
        "embedding_bias": [1.0] * 100,
        "beam_width": 2,
        "temperature": 0.5,
        "runtime_top_k": 3,
        "runtime_top_p": 0.5,
        "runtime_top_p_min": 0.2,
        "runtime_top_p_decay": 0.9,
        "runtime_top_p_reset_ids": 4,
        "repetition_penalty": 1.2,
        "min_length": 2,
        "min_tokens": 2,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.5,
        "random_seed": 11,
        "seed": 11,
        "return_log_probs": True,
        "return_context_logits": True,
        "return_generation_logits": True,
        "return_perf_metrics": True,
        "return_num_input_tokens": True,
        "return_num_output_tokens": True,
        "exclude_input_in_output": True,
        "streaming": True,
        "draft_input_ids": [8, 9],
        "draft_logits": [[0.0] * 100] * 2,
        "draft_acceptance_threshold": 0.5,
    }
    drafted = {name: {"draft_input_ids": [8, 9]} for name in ("draft_logits", "draft_acceptance_threshold")}
    (plain,) = parse()
    required = {"input_ids", "input_lengths", "request_output_len"}
    for tensor in TENSORRT_LLM.inputs:
        name = tensor.name
        if name in required or name == "stop":
            continue
        if name in REFUSED_INPUTS:
            shape = [1 if dim == -1 else dim for dim in tensor.dims]
            with pytest.raises(UnsupportedFeatureError, match=f"`{name}`"):
                parse(**{name: np.ones(shape).tolist()})
        elif name in INERT_INPUTS:
            assert parse(**{name: 1}) == [plain]
        elif name == "beam_width":
            with pytest.raises(UnsupportedFeatureError, match="`beam_width`"):
                parse(beam_width=2)
        else:
            base = drafted.get(name, {})
            (changed,) = parse(**{**base, name: samples[name]})
            assert repr(changed) != repr(parse(**base)[0]), name


def test_zero_beams_and_sequences_mean_one() -> None:
    """beam_width 0 and num_return_sequences 0 are read as 1."""
    (row,) = parse(beam_width=0, num_return_sequences=0)

    assert row.generation.num_return_sequences == 1


def test_input_ids_are_cut_to_input_lengths() -> None:
    """A padded prompt is used up to its stated length."""
    (row,) = parse(input_ids=[5, 6, 7, 0, 0], input_lengths=2)

    assert row.generation.prompt_token_ids == (5, 6)


def test_rows_of_a_batch_do_not_leak_into_each_other() -> None:
    """Each row has its own values and its own request id."""
    inputs = make_inputs(2, runtime_top_k=5, random_seed=1)
    inputs["random_seed"] = np.array([1, 2], np.uint64)
    inputs["input_ids"] = np.array([[1, 2, 3], [4, 5, 6]], np.int32)
    first, second = parse_engine_request(inputs, {}, LIMITS, request_id="r", arrival_time_ns=0)

    assert (first.generation.sampling.seed, second.generation.sampling.seed) == (1, 2)
    assert second.generation.prompt_token_ids == (4, 5, 6)
    assert first.generation.request_id != second.generation.request_id


@pytest.mark.parametrize(("old", "new"), RENAMED_INPUTS.items())
def test_two_generations_of_a_name_must_agree(old: str, new: str) -> None:
    """The old and the new name of an input may both be sent, but only with one value."""
    assert repr(parse(**{old: 3})) == repr(parse(**{new: 3})) == repr(parse(**{old: 3, new: 3}))
    with pytest.raises(InvalidRequestError, match="differ"):
        parse(**{old: 2, new: 3})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"input_ids": None}, "`input_ids` is required"),
        ({"input_ids": [], "input_lengths": 0}, "`input_ids` is empty"),
        ({"input_lengths": 0}, "`input_ids` is empty"),
        ({"input_lengths": 9}, "`input_lengths` is larger than `input_ids` is long; limit 3, given 9"),
        ({"input_lengths": -1}, "`input_lengths` must be at least 0"),
        ({"input_ids": [1] * 41, "input_lengths": 41}, "limit 40 tokens, given 41 tokens"),
        ({"input_ids": [1, 100, 2]}, "limit 0 to 99, given 100"),
        ({"input_ids": [1, -5, 2]}, "given -5"),
        ({"request_output_len": 0}, "`request_output_len` must be at least 1; given 0"),
        ({"request_output_len": 62}, "leaves room for 61 more; limit 64, given 62"),
        ({"temperature": float("nan")}, "`temperature` must be a finite number"),
        ({"temperature": -1.0}, "`temperature` must be a finite number, at least 0"),
        ({"runtime_top_p": 2.0}, "`runtime_top_p`"),
        ({"runtime_top_p": float("nan")}, "`runtime_top_p`"),
        ({"runtime_top_k": -1}, "`runtime_top_k` must be at least 0"),
        ({"repetition_penalty": 0.0}, "`repetition_penalty` must be above 0"),
        ({"frequency_penalty": float("inf")}, "`frequency_penalty`"),
        ({"end_id": 100}, "`end_id` must be from -1 to 99"),
        ({"min_length": 5}, "`min_length` must be from 0 to `request_output_len`; limit 4, given 5"),
        ({"num_return_sequences": 9}, "`num_return_sequences` must be from 0 to 8"),
        ({"embedding_bias": [1.0, 2.0]}, "`embedding_bias` must hold one number per vocabulary entry"),
        ({"embedding_bias": [float("nan")] * 100}, "`embedding_bias` holds NaN"),
        ({"stop_words_list": [[8], [3]]}, "`stop_words_list`"),
        ({"bad_words_list": [[200], [1]]}, "`bad_words_list`"),
        ({"draft_input_ids": [1, 2, 3, 4]}, "`draft_input_ids` leaves no token to generate; limit 3, given 4"),
        ({"draft_input_ids": [100]}, "`draft_input_ids` holds an id outside the vocabulary"),
        ({"draft_input_ids": [1], "draft_logits": [[0.0]]}, "`draft_logits` has a wrong shape; limit [1, 100]"),
        ({"draft_logits": [[0.0] * 100]}, "`draft_logits` came without `draft_input_ids`"),
    ],
)
def test_bad_values_are_refused_with_field_limit_and_value(changes: dict[str, Any], message: str) -> None:
    """Each bad value names its field, the limit, and what was given."""
    with pytest.raises(InvalidRequestError) as caught:
        parse(**changes)

    assert message in str(caught.value)


def test_too_many_rows_are_refused() -> None:
    """A batch beyond the model's maximum is refused whole."""
    with pytest.raises(InvalidRequestError, match="limit 8, given 9"):
        parse(9)


def test_arrays_of_another_batch_size_are_refused() -> None:
    """An array with fewer rows than `input_ids` is refused by name."""
    inputs = make_inputs(2)
    inputs["request_output_len"] = np.array([4], np.int32)
    with pytest.raises(InvalidRequestError, match="`request_output_len` has another batch size"):
        parse_engine_request(inputs, {}, LIMITS, request_id="r", arrival_time_ns=0)


def test_priority_comes_from_a_request_parameter() -> None:
    """`request_priority` is read as an integer; anything else is refused."""
    assert parse(parameters={"request_priority": 2})[0].generation.priority == 2
    for bad in (-1, "high", True, 1.5):
        with pytest.raises(InvalidRequestError, match="`request_priority`"):
            parse(parameters={"request_priority": bad})


def test_stop_is_recognised() -> None:
    """Only a true `stop` makes a request a stop request."""
    assert is_stop_request(make_inputs(stop=True))
    assert not is_stop_request(make_inputs(stop=False))
    assert not is_stop_request(make_inputs())
