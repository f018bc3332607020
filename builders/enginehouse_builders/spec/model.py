"""The spec: one YAML document that asks for an engine, as typed, frozen values.

This module says what a spec may contain and what holds within one field. What a target or a device allows is a question
of several fields and lives in :mod:`enginehouse_builders.spec.compatibility`; reading files, line numbers and advice on
misspelt keys live in :mod:`enginehouse_builders.spec.loading`.

Sizes are counts of tokens, sequences or bytes, as the names say; fractions lie between 0 and 1; money is a decimal
string.
"""

from __future__ import annotations

from decimal import Decimal
from enum import Enum
from typing import Annotated, Final, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, StringConstraints, model_validator

from enginehouse_contract.manifest import Target  # noqa: TC001 - pydantic reads annotations at run time

SPEC_VERSION: Final = 1


class SourceFormat(str, Enum):
    """What the model's files are; ``auto`` looks at them."""

    AUTO = "auto"
    GGUF = "gguf"
    HUGGING_FACE = "huggingface"
    TENSORRT_LLM_CHECKPOINT = "tensorrt_llm_checkpoint"


class ComputeType(str, Enum):
    """The type of activations, and of weights that are not quantized; ``auto`` is the model's own."""

    AUTO = "auto"
    F32 = "f32"
    F16 = "f16"
    BF16 = "bf16"


class WeightQuantization(str, Enum):
    """How weights are stored. The value is the field's name in a spec, a manifest and a plan."""

    NONE = "none"  # stored in the compute type
    AS_IN_FILE = "as_in_file"  # a GGUF's own blocks, exactly
    INT8 = "int8"  # weight-only, per output channel
    INT8_SMOOTHQUANT = "int8_smoothquant"  # weights and activations
    INT4 = "int4"  # weight-only, round to nearest, in groups
    INT4_AWQ = "int4_awq"
    INT4_GPTQ = "int4_gptq"
    FP8 = "fp8"
    NVFP4 = "nvfp4"


class KvType(str, Enum):
    """The type of the KV cache; ``auto`` is the target's default (u8 on a CPU, the compute type on a GPU)."""

    AUTO = "auto"
    U8 = "u8"
    INT8 = "int8"
    FP8 = "fp8"
    F16 = "f16"
    BF16 = "bf16"
    F32 = "f32"


class SchedulerPolicy(str, Enum):
    """TensorRT-LLM's names: never preempt, or admit more and pause when memory runs out."""

    GUARANTEED_NO_EVICT = "guaranteed_no_evict"
    MAX_UTILIZATION = "max_utilization"


class SpeculationMethod(str, Enum):
    """Where drafts come from."""

    NONE = "none"
    NGRAM = "ngram"
    DRAFT_TARGET = "draft_target"
    EAGLE3 = "eagle3"
    MTP = "mtp"
    MEDUSA = "medusa"
    LOOKAHEAD = "lookahead"


def _exact_decimal(value: object) -> object:
    if isinstance(value, float):
        raise ValueError('money is a decimal in quotes, such as "2.50"; a plain 2.50 is rounded before it is read')  # noqa: TRY004 - pydantic turns ValueError into a located error
    return value


Money = Annotated[
    Decimal, BeforeValidator(_exact_decimal), Field(ge=0, allow_inf_nan=False), PlainSerializer(str, return_type=str)
]
Count = Annotated[int, Field(ge=1, strict=True)]
NumBytes = Annotated[int, Field(ge=0, strict=True)]
Fraction = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]
Name = Annotated[str, StringConstraints(min_length=1, max_length=100, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
Currency = Annotated[str, StringConstraints(pattern=r"^[A-Z]{3}$")]


class _Part(BaseModel):
    """A part of a spec: immutable, and a key it does not know is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class ModelSource(_Part):
    """Where the model comes from."""

    source: Annotated[str, StringConstraints(min_length=1)]
    """A GGUF file, a Hugging Face folder or a TensorRT-LLM checkpoint folder; relative to the spec's own folder."""
    format: SourceFormat = SourceFormat.AUTO
    """What the files are; `auto` looks at them."""
    sha256: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")] | None = None
    """If given, the digest that the source must have (of the file, or of the folder as the manifest records it)."""


class Calibration(_Part):
    """Text that data-aware quantization looks at (SmoothQuant, AWQ, GPTQ, fp8 and nvfp4 scales)."""

    data: str | None = None
    """A text file (one sample per line) or JSON lines with `text`; none is the set that comes with Enginehouse."""
    num_samples: Count = 128
    """Samples used, in the file's order."""
    max_sample_tokens: Count = 512
    """Tokens used of each sample."""


class Quantization(_Part):
    """How weights are made smaller."""

    weights: WeightQuantization | None = None
    """None takes the file's own quantization where it has one, else stores weights in the compute type."""
    group_size: Annotated[int, Field(ge=16, le=1024, strict=True)] | None = None
    """Weights that share one scale, for the int4 methods; none is the method's usual size."""
    calibration: Calibration = Calibration()
    """What data-aware methods look at."""


class Parallelism(_Part):
    """How one model is spread over GPUs; a CPU build has one rank."""

    tensor: Count = 1
    """Ranks that share every layer."""
    pipeline: Count = 1
    """Ranks that follow one another, each with its own layers."""
    expert: Count = 1
    """Ranks among which the experts of a mixture are divided; must divide `tensor`."""

    @property
    def world_size(self) -> int:
        """Ranks, and so GPUs, of one replica."""
        return self.tensor * self.pipeline

    @model_validator(mode="after")
    def _experts_divide_tensor_ranks(self) -> Parallelism:
        if self.tensor % self.expert:
            raise ValueError(f"`expert` ({self.expert}) must divide `tensor` ({self.tensor})")
        return self


class Limits(_Part):
    """What the engine is built to hold; serving may lower these, never raise them."""

    max_batch_size: Count = 64
    """Sequences generated at a time."""
    max_input_len: Count | None = None
    """Tokens of a prompt; none is `max_seq_len` less one."""
    max_seq_len: Count | None = None
    """Tokens of prompt and answer together; none is what the model was trained for."""
    max_num_tokens: Count | None = None
    """Tokens computed in one step; none is the target's default (512 on a CPU, 8192 on a GPU)."""
    max_beam_width: Count = 1
    """Beams per request; 1 is no beam search."""

    @model_validator(mode="after")
    def _inputs_fit_sequences(self) -> Limits:
        if self.max_input_len and self.max_seq_len and self.max_input_len >= self.max_seq_len:
            raise ValueError(
                f"`max_input_len` ({self.max_input_len}) must be under `max_seq_len` ({self.max_seq_len}), which "
                "counts the answer too"
            )
        return self


class KvCache(_Part):
    """The paged KV cache."""

    dtype: KvType = KvType.AUTO
    """The type of keys and values."""
    tokens_per_block: Annotated[int, Field(ge=8, le=256, strict=True)] | None = None
    """Tokens of one block; none is the target's default (32)."""
    memory_fraction: Fraction = 0.9
    """Share of the memory left after weights and activations that blocks may take."""
    reuse: bool = True
    """Whether prompts that begin alike share blocks."""
    host_offload_bytes: NumBytes = 0
    """Host memory for blocks that a GPU has no room for."""


class Scheduling(_Part):
    """How steps are filled."""

    policy: SchedulerPolicy = SchedulerPolicy.GUARANTEED_NO_EVICT
    """Never preempt, or admit more and pause when memory runs out."""
    chunked_context: bool = True
    """Whether a long prompt is computed in several steps, between the answers of others."""


class Speculation(_Part):
    """Drafts that the engine checks in one step."""

    method: SpeculationMethod = SpeculationMethod.NONE
    """Where drafts come from."""
    num_draft_tokens: Annotated[int, Field(ge=1, le=64, strict=True)] = 5
    """Drafted tokens per step, at most."""
    draft_model: str | None = None
    """The draft model or the trained heads: needed by `draft_target`, `eagle3` and `medusa`."""


class Lora(_Part):
    """Low-rank adapters chosen per request."""

    adapters: tuple[str, ...] = ()
    """Folders of adapters in Hugging Face's format."""
    max_rank: Annotated[int, Field(ge=1, le=512, strict=True)] = 64
    """The largest rank that fits."""
    target_modules: tuple[str, ...] = ("attn_q", "attn_k", "attn_v")
    """The weights that adapters change, by TensorRT-LLM's names."""


class NumericGate(_Part):
    """How far a build's numbers may be from its reference's, over the gate's prompts."""

    min_token_agreement: Fraction = 0.85
    """Share of greedy tokens that agree, each predicted from the reference's own prefix."""
    max_mean_kl_divergence: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.1
    """Mean over tokens of KL(reference || build), in nats."""
    max_perplexity_ratio: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 1.1
    """Perplexity of the build over the reference's, on the same text."""


class SpeedGate(_Part):
    """How fast a build must be, beside its reference on the same trace in the same run."""

    min_throughput_ratio: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 0.9
    """Tokens per second over the reference's."""
    max_ttft_ratio: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.25
    """Median time to first token over the reference's."""
    max_itl_ratio: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.25
    """Median time between tokens over the reference's."""
    max_ttft_ms: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Median time to first token, in milliseconds, whatever the reference does."""
    max_itl_ms: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Median time between tokens, in milliseconds, whatever the reference does."""


class CostGate(_Part):
    """What a build's tokens may cost."""

    max_per_million_output_tokens: Money | None = None
    """In the currency of `costs`; none compares with the reference only."""
    max_ratio: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.1
    """Cost per million output tokens over the reference's."""


class Gates(_Part):
    """Thresholds that a build must meet before it may be promoted."""

    numeric: NumericGate = NumericGate()
    """Agreement with the reference build."""
    speed: SpeedGate = SpeedGate()
    """Speed beside the reference build."""
    cost: CostGate = CostGate()
    """Cost per million tokens."""
    prompts: str | None = None
    """A file of your own prompts (JSON lines with `prompt`), used beside the ones that come with Enginehouse."""


class Costs(_Part):
    """What the machine costs; plans, gates and benchmarks turn seconds into money with it."""

    machine_hour: Money | None = None
    """One hour of one device; none takes the device catalogue's, or leaves cost unknown."""
    currency: Currency = "USD"
    """ISO 4217."""


class Spec(_Part):
    """One declarative request for an engine, for one or several targets."""

    spec_version: Literal[1] = SPEC_VERSION
    """The version of this format."""
    name: Name
    """The model's name, by which builds are found."""
    model: ModelSource
    """Where the model comes from."""
    targets: Annotated[tuple[Target, ...], Field(min_length=1)] = ("cpu",)
    """What to build for; one build each."""
    device: Name | None = None
    """The device that plans are made for (`enginehouse plan --device` overrides it)."""
    dtype: ComputeType = ComputeType.AUTO
    """The type of activations."""
    quantization: Quantization = Quantization()
    """How weights are made smaller."""
    parallelism: Parallelism = Parallelism()
    """How one model is spread over GPUs."""
    limits: Limits = Limits()
    """What the engine is built to hold."""
    kv_cache: KvCache = KvCache()
    """The paged KV cache."""
    scheduling: Scheduling = Scheduling()
    """How steps are filled."""
    speculation: Speculation = Speculation()
    """Drafts that the engine checks in one step."""
    lora: Lora | None = None
    """Low-rank adapters chosen per request."""
    gates: Gates = Gates()
    """Thresholds before promotion."""
    costs: Costs = Costs()
    """What the machine costs."""

    @model_validator(mode="after")
    def _targets_are_named_once(self) -> Spec:
        if len(set(self.targets)) != len(self.targets):
            raise ValueError(f"`targets` names one target twice: {', '.join(self.targets)}")
        return self

    @model_validator(mode="after")
    def _drafts_have_a_source(self) -> Spec:
        needs_model = {SpeculationMethod.DRAFT_TARGET, SpeculationMethod.EAGLE3, SpeculationMethod.MEDUSA}
        method = self.speculation.method
        if method in needs_model and not self.speculation.draft_model:
            raise ValueError(f"speculation by `{method.value}` needs `speculation.draft_model`")
        if self.speculation.draft_model and method not in needs_model:
            raise ValueError(f"`speculation.draft_model` means nothing to the method `{method.value}`; remove it")
        return self
