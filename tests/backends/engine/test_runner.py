"""The runner against its own full rows: chunks, batches, shared and copied blocks, edge sizes, refused builds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import openvino as ov
import pytest
from openvino import opset16 as ops

from enginehouse_backends.engine.request import SequenceId
from enginehouse_backends.engine.runner import OpenVinoRunner
from enginehouse_backends.engine.step import BlockId, SequenceSlice, StepPlan
from enginehouse_contract.errors import BuildIntegrityError, ConfigurationError
from enginehouse_contract.manifest import MODEL_FILE

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq
    from pathlib import Path

    from numpy.typing import NDArray

NUM_BLOCKS = 512
MIB = 1 << 20


@pytest.fixture(scope="module")
def runner(smollm2_build: Path) -> OpenVinoRunner:
    """The SmolLM2 build in accuracy mode with 8-bit KV, the hardest to keep exact."""
    return OpenVinoRunner.load(
        smollm2_build, kv_memory_bytes=1024 * MIB, max_kv_tokens=NUM_BLOCKS * 32, kv_precision="u8"
    )


@pytest.fixture(scope="module")
def f32_runner(smollm2_build: Path) -> OpenVinoRunner:
    """The SmolLM2 build with unquantized KV, where rounding stays rounding."""
    return OpenVinoRunner.load(smollm2_build, kv_memory_bytes=256 * MIB, kv_precision="f32")


def prompt(num_tokens: int, seed: int) -> list[int]:
    """Random token ids: no pattern for an error to hide in."""
    return np.random.default_rng(seed).integers(10, 49_000, num_tokens).tolist()


def piece(token_ids: Seq[int], *, past: int = 0, first_block: int = 0, rows: int = 1) -> SequenceSlice:
    """A slice of a sequence whose blocks are consecutive."""
    num_blocks = -(-(past + len(token_ids)) // 32)
    blocks = [BlockId(first_block + index) for index in range(num_blocks)]
    return SequenceSlice(SequenceId(first_block), token_ids, past, blocks, rows)


def run(runner: OpenVinoRunner, *slices: SequenceSlice) -> NDArray[np.float32]:
    """Return the full rows of one step, [rows, vocab]."""
    plan = StepPlan(slices)
    logits = runner.run(plan)
    rows = [logits.full_row(row) for row in range(plan.num_logit_rows)]
    return np.array(rows, np.float32).reshape(len(rows), runner.vocab_size)


def run_in_chunks(runner: OpenVinoRunner, token_ids: list[int], chunks: list[int]) -> NDArray[np.float32]:
    """Return all rows of a prompt computed in chunks, [tokens, vocab]."""
    rows, past = [], 0
    for length in chunks:
        chunk = token_ids[past : past + length]
        rows.append(run(runner, piece(chunk, past=past, first_block=10, rows=length)))
        past += length
    return np.concatenate(rows)


@pytest.mark.model
@pytest.mark.parametrize("chunks", [[64, 64, 22], [33, 33, 33, 33, 18], [2, 148], [5] * 30])
def test_a_prompt_in_chunks_gives_the_bits_of_one_pass(runner: OpenVinoRunner, chunks: list[int]) -> None:
    """All rows of a chunked prompt equal those of the whole prompt, even with 8-bit KV."""
    token_ids = prompt(150, seed=1)
    np.testing.assert_array_equal(run_in_chunks(runner, token_ids, chunks), run(runner, piece(token_ids, rows=150)))


@pytest.mark.model
@pytest.mark.parametrize("chunks", [[149, 1], [1, 149], [110, *[1] * 40]])
def test_single_tokens_give_the_rows_of_one_pass_to_rounding(f32_runner: OpenVinoRunner, chunks: list[int]) -> None:
    """Attention of a single token adds up in another order than that of many, and no more than that differs."""
    token_ids = prompt(150, seed=1)
    whole = run(f32_runner, piece(token_ids, rows=150))
    np.testing.assert_allclose(run_in_chunks(f32_runner, token_ids, chunks), whole, atol=1e-3)


@pytest.mark.model
def test_decoding_in_a_batch_gives_the_bits_of_decoding_alone(runner: OpenVinoRunner) -> None:
    """Decode rows do not change by a bit with the number of sequences or a prompt chunk in the step."""
    prompts = [prompt(int(length), seed=2) for length in np.random.default_rng(2).integers(1, 90, 64)]

    def decode(index: int) -> SequenceSlice:
        return piece([42], past=len(prompts[index]), first_block=4 * index)

    alone = []
    for index, token_ids in enumerate(prompts):
        run(runner, piece(token_ids, first_block=4 * index, rows=0))
        alone.append(run(runner, decode(index))[0])
    for num_sequences in (1, 2, 3, 8, 17, 64):
        batch = run(runner, *(decode(index) for index in range(num_sequences)))
        np.testing.assert_array_equal(batch, alone[:num_sequences])
    chunk = piece(prompt(77, seed=3), first_block=300, rows=0)
    np.testing.assert_array_equal(run(runner, chunk, decode(5), decode(9)), [alone[5], alone[9]])


@pytest.mark.model
def test_rows_of_drafts_are_those_of_decoding_one_by_one(f32_runner: OpenVinoRunner) -> None:
    """Several tokens with all their rows in one step give the rows of as many steps, to rounding."""
    token_ids = prompt(40, seed=4)
    run(f32_runner, piece(token_ids[:36], rows=0), piece(token_ids[:36], first_block=10, rows=0))
    together = run(f32_runner, piece(token_ids[36:], past=36, rows=4))
    one_by_one = [run(f32_runner, piece([token_ids[i]], past=i, first_block=10))[0] for i in range(36, 40)]
    np.testing.assert_allclose(together, one_by_one, atol=1e-3)


@pytest.mark.model
def test_sequences_share_a_prefix_by_its_block_ids(runner: OpenVinoRunner) -> None:
    """A sequence that names another's full blocks gives the rows of one that computed them itself."""
    token_ids = prompt(100, seed=5)
    own = run(runner, piece(token_ids))
    blocks = [BlockId(block) for block in (0, 1, 2, 20)]
    shared = run(runner, SequenceSlice(SequenceId(7), token_ids[96:], 96, blocks, 1))
    np.testing.assert_array_equal(shared, own)


@pytest.mark.model
def test_block_copies_come_before_the_pass_and_leave_the_source_alone(runner: OpenVinoRunner) -> None:
    """A copied partial block continues like its source, and the source continues unharmed."""
    token_ids = prompt(50, seed=6)
    run(runner, piece(token_ids, rows=0))
    other = SequenceSlice(SequenceId(8), [7], 50, [BlockId(0), BlockId(30)], 1)
    copied = runner.run(StepPlan((other,), block_copies=((BlockId(1), BlockId(30)),))).full_row(0)
    source = run(runner, piece([9], past=50))
    run(runner, piece(token_ids, first_block=40, rows=0))
    np.testing.assert_array_equal(copied, run(runner, piece([7], past=50, first_block=40))[0])
    np.testing.assert_array_equal(source, run(runner, piece([9], past=50, first_block=40)))


@pytest.mark.model
def test_top_k_and_log_sum_exp_are_those_of_the_full_row(runner: OpenVinoRunner) -> None:
    """The sampling outputs agree with numpy on the whole vocabulary."""
    logits = runner.run(StepPlan((piece(prompt(30, seed=7), rows=30),)))
    assert logits.top_values.shape == logits.top_ids.shape == (30, 64)
    for row in range(30):
        full = logits.full_row(row)
        np.testing.assert_array_equal(logits.top_values[row], np.sort(full)[::-1][:64])
        np.testing.assert_array_equal(full[logits.top_ids[row]], logits.top_values[row])
        assert len(set(logits.top_ids[row].tolist())) == 64
        expected = np.log(np.exp(full.astype(np.float64) - full.max()).sum()) + full.max()
        np.testing.assert_allclose(logits.log_sum_exp[row], expected, atol=1e-4)


@pytest.mark.model
def test_full_row_is_a_copy_that_may_be_written(runner: OpenVinoRunner) -> None:
    """Writing into a row changes neither the next copy nor the step's own values."""
    logits = runner.run(StepPlan((piece(prompt(3, seed=8)),)))
    row = logits.full_row(0)
    before = row.copy()
    row[:] = 0
    np.testing.assert_array_equal(logits.full_row(0), before)


@pytest.mark.model
@pytest.mark.parametrize("num_tokens", [1, 2, 31, 32, 33, 2048])
def test_steps_of_any_size_with_or_without_rows(f32_runner: OpenVinoRunner, num_tokens: int) -> None:
    """A step that wants no row answers none and still computes the KV that the next step reads."""
    token_ids = prompt(num_tokens, seed=9)
    logits = f32_runner.run(StepPlan((piece(token_ids, rows=0),)))
    assert len(logits.top_ids) == len(logits.top_values) == len(logits.log_sum_exp) == 0
    after = run(f32_runner, piece([11], past=num_tokens))
    whole = run(f32_runner, piece([*token_ids, 11], first_block=80))
    np.testing.assert_allclose(after, whole, atol=1e-3)


@pytest.mark.model
def test_memory_decides_the_number_of_blocks(smollm2_build: Path, runner: OpenVinoRunner) -> None:
    """As many blocks as the memory holds, fewer when fewer slots are asked for."""
    assert runner.num_blocks == NUM_BLOCKS
    assert runner.tokens_per_block == 32
    budget = 5 * runner.bytes_per_block + 1
    assert OpenVinoRunner.load(smollm2_build, kv_memory_bytes=budget, kv_precision="u8").num_blocks == 5


@pytest.mark.model
def test_too_little_memory_is_refused_with_the_numbers(smollm2_build: Path, runner: OpenVinoRunner) -> None:
    """A budget under one block names the block's size; so does a slot limit under one block."""
    with pytest.raises(ConfigurationError, match=f"at least {runner.bytes_per_block} bytes, given 1000 bytes"):
        OpenVinoRunner.load(smollm2_build, kv_memory_bytes=1000, kv_precision="u8")
    with pytest.raises(ConfigurationError, match=r"max_tokens_in_paged_kv_cache.*at least 32.*given 31"):
        OpenVinoRunner.load(smollm2_build, kv_memory_bytes=MIB, kv_precision="u8", max_kv_tokens=31)
    with pytest.raises(ConfigurationError, match=r"cannot be had from this host.*Cannot allocate memory"):
        OpenVinoRunner.load(smollm2_build, kv_memory_bytes=1 << 60, kv_precision="u8")


@pytest.mark.model
@pytest.mark.parametrize("kv_precision", ["u8", "f16", "f32"])
def test_performance_mode_runs_with_every_kv_precision(smollm2_build: Path, kv_precision: str) -> None:
    """The host's fastest arithmetic knows what follows a plain prompt."""
    runner = OpenVinoRunner.load(
        smollm2_build, kv_memory_bytes=64 * MIB, kv_precision=kv_precision, execution_mode="performance"
    )
    logits = runner.run(StepPlan((piece([504, 3575, 282, 4649, 314], rows=1),)))  # "The capital of France is"
    assert 7042 in logits.top_ids[0, :3]  # " Paris"


def test_an_unknown_kv_precision_is_refused_by_name(tmp_path: Path) -> None:
    """The refusal lists what can be had."""
    with pytest.raises(ConfigurationError, match=r"kv_precision.*u8.*given fp8"):
        OpenVinoRunner.load(tmp_path, kv_memory_bytes=MIB, kv_precision="fp8")


@pytest.mark.parametrize("content", [None, "", "<html>not a model</html>", '<?xml version="1.0"?><net name="cut'])
def test_a_file_that_is_no_model_is_refused(tmp_path: Path, content: str | None) -> None:
    """A missing, empty, foreign or truncated file is named, without a traceback of the runtime."""
    if content is not None:
        (tmp_path / MODEL_FILE).write_text(content)
    with pytest.raises(BuildIntegrityError, match=MODEL_FILE):
        OpenVinoRunner.load(tmp_path, kv_memory_bytes=MIB, kv_precision="u8")


def test_a_model_that_is_no_decoder_is_refused_with_what_is_missing(tmp_path: Path) -> None:
    """A model without the decoder's inputs, output and state is refused by naming them."""
    numbers = ops.parameter([-1, 4], np.float32, name="pixels")
    numbers.output(0).get_tensor().set_names({"pixels"})
    ov.save_model(ov.Model([ops.result(ops.relu(numbers))], [numbers]), tmp_path / MODEL_FILE)
    with pytest.raises(BuildIntegrityError, match=r"input `input_ids`.*output `logits`.*KV state"):
        OpenVinoRunner.load(tmp_path, kv_memory_bytes=MIB, kv_precision="u8")


@pytest.mark.model
def test_a_build_with_truncated_weights_is_refused(smollm2_build: Path, tmp_path: Path) -> None:
    """Weights that end early are an error at load, not garbage."""
    (tmp_path / MODEL_FILE).write_bytes((smollm2_build / MODEL_FILE).read_bytes())
    weights = MODEL_FILE.replace(".xml", ".bin")
    (tmp_path / weights).write_bytes((smollm2_build / weights).read_bytes()[:100_000])
    with pytest.raises(BuildIntegrityError, match=MODEL_FILE):
        OpenVinoRunner.load(tmp_path, kv_memory_bytes=MIB, kv_precision="u8")
