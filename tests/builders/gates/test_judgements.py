"""Speed, cost, memory and compatibility: what each says of given measurements and hosts."""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pytest
from tests.support.bigram_builds import BigramService, ByteEncoder, make_table, write_bigram_build

from enginehouse_builders.gates.agreement import gives_logits
from enginehouse_builders.gates.compatibility import Needs, compatibility_gate, needs_of
from enginehouse_builders.gates.cost import cost_gate
from enginehouse_builders.gates.host import Gpu, Host, describe_host, parse_gpu
from enginehouse_builders.gates.memory import memory_gate, plan_of
from enginehouse_builders.gates.prompts import read_prompts, shipped_prompts
from enginehouse_builders.gates.speed import PromptMaker, Round, SpeedRun, Trace, judge, speed_gate
from enginehouse_builders.spec.model import CostGate, SpeedGate
from enginehouse_builders.store import StoredBuild
from enginehouse_contract.errors import ConfigurationError

if TYPE_CHECKING:
    from pathlib import Path

H100 = Gpu("NVIDIA H100 80GB HBM3", 90, "550.54.15", 80 << 30)
GPU_HOST = Host("cpu", 8, 64 << 30, (H100, H100), {"tensorrt_llm": "1.2.1", "openvino": "2026.4.1"})
ENGINE = Needs("tensorrt_llm", "tensorrt_llm", "1.2.1", 90, "12.9", 2)

ANY_SPEED = SpeedGate(min_throughput_ratio=1e-9, max_ttft_ratio=1e9, max_itl_ratio=1e9)


def _rounds(*speeds: float, ttft_s: float = 0.1, itl_s: float = 0.02) -> tuple[Round, ...]:
    return tuple(Round(100 / speed, 100, ttft_s, itl_s) for speed in speeds)


def test_speed_is_judged_by_the_median_of_pairs() -> None:
    """A machine that is slow for a while slows both rounds of a pair, and one odd pair does not decide."""
    run = SpeedRun(_rounds(100, 50, 10), _rounds(101, 50, 101))
    result = judge(run, SpeedGate())
    assert result.status == "passed"
    assert result.numbers["throughput_ratio"] == pytest.approx(100 / 101)


@pytest.mark.parametrize(
    ("build", "limits", "word"),
    [
        (_rounds(80, 80, 80), SpeedGate(), "throughput"),
        (_rounds(100, 100, 100, ttft_s=0.2), SpeedGate(), "TTFT"),
        (_rounds(100, 100, 100, itl_s=0.03), SpeedGate(), "ITL"),
        (_rounds(100, 100, 100), SpeedGate(max_ttft_ms=99), "ttft_ms"),
        (_rounds(100, 100, 100), SpeedGate(max_itl_ms=19), "itl_ms"),
    ],
)
def test_each_speed_threshold_fails_by_itself(build: tuple[Round, ...], limits: SpeedGate, word: str) -> None:
    """And is named in the reason."""
    result = judge(SpeedRun(build, _rounds(100, 100, 100)), limits)
    assert result.status == "failed"
    assert word in result.reason
    assert ";" not in result.reason


def test_rounds_alternate_and_never_repeat_a_prompt() -> None:
    """A B, B A, A B; every prompt has one length and a beginning of its own, so no prefix is cached."""
    order: list[str] = []
    asked: list[tuple[int, ...]] = []

    class Noting(BigramService):
        def stream(self, token_ids: Any, num_tokens: int) -> Any:
            order.append(self.served_build_id)
            asked.append(tuple(token_ids))
            return super().stream(token_ids, num_tokens)

    services = {name: Noting(make_table(), name) for name in "ab"}
    trace = Trace(num_requests=1, num_prompt_tokens=20, num_output_tokens=3, concurrency=1, num_pairs=3)
    prompts = PromptMaker(ByteEncoder(), ["some words"])
    _, run = speed_gate(lambda: services["a"], lambda: services["b"], prompts, ANY_SPEED, trace)
    assert "".join(order) == "aabb" + "aabb" + "bbaa" + "aabb"  # a waking request before each round
    assert {len(prompt) for prompt in asked} == {20}
    assert len(set(asked)) == len(asked)
    assert [one.num_output_tokens for one in (*run.build, *run.reference)] == [3] * 6


def test_a_build_that_seems_slow_is_measured_longer() -> None:
    """Before it has failed, nine pairs were run; what passes after three is not measured again."""
    service = BigramService(make_table(), "a")
    trace = Trace(num_requests=1, num_prompt_tokens=8, num_output_tokens=2, concurrency=1)
    for limits, num_pairs in ((ANY_SPEED, 3), (SpeedGate(min_throughput_ratio=1e9), 9)):
        prompts = PromptMaker(ByteEncoder(), ["words"])
        result, run = speed_gate(lambda: service, lambda: service, prompts, limits, trace)
        assert len(run.build) == len(run.reference) == num_pairs
        assert result.status == ("passed" if num_pairs == 3 else "failed")


def test_cost_is_machine_time_at_the_rate() -> None:
    """100 tokens per second at 3.60 an hour: 10 units per million tokens, exactly."""
    run = SpeedRun(_rounds(100, 100), _rounds(50, 50))
    result = cost_gate(run, CostGate(), Decimal("3.60"), "EUR")
    assert result.numbers["cost_per_million_output_tokens"] == "10"
    assert result.numbers["cost_ratio"] == pytest.approx(0.5)
    assert result.status == "passed"
    dear = cost_gate(run, CostGate(max_per_million_output_tokens=Decimal("9.99")), Decimal("3.60"), "EUR")
    assert dear.status == "failed"
    assert "9.99" in dear.reason


def test_an_unknown_rate_is_not_free() -> None:
    """Money is null; seconds are still compared; a limit in money cannot be met by what nobody knows."""
    run = SpeedRun(_rounds(40), _rounds(50))
    result = cost_gate(run, CostGate(), None, "USD")
    assert result.numbers["cost_per_million_output_tokens"] is None
    assert result.status == "failed"
    assert cost_gate(run, CostGate(max_per_million_output_tokens=Decimal(100)), None, "USD").status == "failed"
    assert cost_gate(replace(run, reference=()), CostGate(), None, "USD").status == "skipped"


def test_an_engine_loads_where_everything_matches() -> None:
    """The same release, architecture, enough GPUs, a driver that is new enough."""
    assert compatibility_gate(ENGINE, GPU_HOST).status == "passed"


@pytest.mark.parametrize(
    ("needs", "host", "words"),
    [
        (ENGINE, replace(GPU_HOST, gpus=()), "no NVIDIA driver"),
        (ENGINE, replace(GPU_HOST, gpus=(H100,)), "needs 2 GPUs"),
        (replace(ENGINE, sm=80), GPU_HOST, "SM 80, and here is SM 90"),
        (ENGINE, replace(GPU_HOST, runtime_versions={"tensorrt_llm": "1.2.0"}), "under that release only"),
        (ENGINE, replace(GPU_HOST, runtime_versions={}), "install tensorrt_llm 1.2.1"),
        (replace(ENGINE, cuda_version="13.0"), GPU_HOST, "needs driver 580"),
        (Needs("cpu", "openvino", "2027.1.0", None, None, 1), GPU_HOST, "the older 2026.4.1"),
    ],
)
def test_each_reason_why_a_build_cannot_load_here_is_told(needs: Needs, host: Host, words: str) -> None:
    """With what it needs, what is here, and what to do."""
    result = compatibility_gate(needs, host)
    assert result.status == "failed"
    assert words in result.reason


def test_needs_are_read_from_what_the_build_on_a_gpu_recorded(tmp_path: Path) -> None:
    """The manifest's versions and architecture, the engine config's ranks; only its own word makes it give logits."""
    versions = {"tensorrt_llm": "1.2.1", "cuda": "12.9", "gpu_architecture": "sm_90"}
    manifest = replace(write_bigram_build(tmp_path, "gpu").manifest, target="tensorrt_llm", tool_versions=versions)
    config = {"pretrained_config": {"mapping": {"world_size": 2, "tp_size": 2}}, "build_config": {}}
    assert needs_of(manifest, config) == ENGINE
    assert not gives_logits(manifest, config)
    assert gives_logits(manifest, {"build_config": {"gather_context_logits": True}})
    assert gives_logits(replace(manifest, target="cpu"), config)


def test_an_older_openvino_build_loads_under_a_newer_one() -> None:
    """The runtime reads models of earlier releases."""
    needs = Needs("cpu", "openvino", "2025.1.0", None, None, 1)
    assert compatibility_gate(needs, GPU_HOST).status == "passed"


def test_memory_is_planned_for_one_rank_of_one_gpu(tmp_path: Path) -> None:
    """Weights are the files' bytes over the ranks, beside what one GPU has; KV heads are divided too."""
    build = write_bigram_build(tmp_path, "gpu", num_key_value_heads=2, num_attention_heads=2)
    one_rank = plan_of(build, {"pretrained_config": {}}, GPU_HOST)
    gpu = StoredBuild(build.build_dir, replace(build.manifest, target="tensorrt_llm_pytorch", kv_precision="bf16"))
    two_ranks = plan_of(gpu, {"pretrained_config": {"mapping": {"world_size": 2}}}, GPU_HOST)
    assert one_rank.available_bytes == GPU_HOST.available_bytes
    assert two_ranks.available_bytes == H100.memory_bytes
    assert two_ranks.weights_bytes == one_rank.weights_bytes // 2
    assert two_ranks.kv_bytes_per_token == 2 * 2 * 1 * 16 * 2
    assert memory_gate(two_ranks).status == "passed"


def test_this_host_has_a_kind_that_makes_a_name() -> None:
    """Letters, digits and dashes, the same each time; GPUs decide where there are some."""
    kind = describe_host().kind
    assert kind == describe_host().kind
    assert set(kind) <= set("abcdefghijklmnopqrstuvwxyz0123456789-")
    assert GPU_HOST.kind == "gpu-nvidia-h100-80gb-hbm3-x2"
    assert parse_gpu("A, B, 8.6, 535.1, 1024") == Gpu("A, B", 86, "535.1", 1 << 30)


def test_the_shipped_prompts_are_diverse() -> None:
    """Texts and conversations, none twice."""
    prompts = shipped_prompts()
    assert len({prompt.text for prompt in prompts if prompt.text}) >= 20
    assert sum(1 for prompt in prompts if prompt.messages) >= 5


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "holds no prompts"),
        (b"\n\n", "holds no prompts"),
        (b"Once upon a time\n", ":1: not JSON"),
        (b'{"prompt": "a"}\n{"text": "b"}\n', ":2: must be an object with `prompt`"),
        (b'{"prompt": ""}', "`prompt` must be a text"),
        (b'{"prompt": 3}', "`prompt` must be a text"),
        (b'{"messages": []}', "`messages` must be a list"),
        (b'{"messages": [{"role": "king", "content": "a"}]}', "`messages` must be objects"),
        (b"\xff\xfe", "not UTF-8"),
        (b"[" * 100_000, "not JSON"),
    ],
)
def test_a_bad_prompt_file_names_its_line(tmp_path: Path, content: bytes, words: str) -> None:
    """And says what a line must be."""
    path = tmp_path / "mine.jsonl"
    path.write_bytes(content)
    with pytest.raises(ConfigurationError, match=words):
        read_prompts(path)
    with pytest.raises(ConfigurationError, match="cannot be read"):
        read_prompts(tmp_path / "none.jsonl")


def test_own_prompts_are_read(tmp_path: Path) -> None:
    """Plain and as conversations; a byte order mark and empty lines do no harm."""
    path = tmp_path / "mine.jsonl"
    path.write_text('\ufeff{"prompt": "a b"}\n\n{"messages": [{"role": "user", "content": "c"}]}\n', encoding="utf-8")
    first, second = read_prompts(path)
    assert (first.text, first.where) == ("a b", f"{path}:1")
    assert second.messages == ({"role": "user", "content": "c"},)
