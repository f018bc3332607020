"""`enginehouse plan`: what a spec, or a model, will need and give on a device."""

from __future__ import annotations

import re
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Optional

import typer

from enginehouse_cli.console import EXIT_FAILED, print_json
from enginehouse_cli.options import JsonFlag
from enginehouse_contract.money import parse_price
from enginehouse_contract.settings import load_settings

if TYPE_CHECKING:
    from enginehouse_builders.plan.devices import Device
    from enginehouse_builders.plan.planner import Plan
    from enginehouse_builders.spec.model import Spec

_SPEC_SUFFIXES: Final = {".yaml", ".yml"}
_USUAL_NUM_TOKENS: Final = 1000


def plan(
    path: Annotated[
        Path, typer.Argument(help="A spec (YAML), or a model: GGUF file, Hugging Face folder, checkpoint.")
    ],
    device: Annotated[
        Optional[list[str]], typer.Option("--device", help="cpu, h100, l40s, ...; may be repeated to compare.")
    ] = None,
    input_tokens: Annotated[
        Optional[int],
        typer.Option(
            "--input-tokens", min=1, help="Mean tokens of a prompt. Default: 1000, or what fits in max_seq_len."
        ),
    ] = None,
    output_tokens: Annotated[
        Optional[int],
        typer.Option("--output-tokens", min=1, help="Mean tokens of an answer. Default: as of a prompt."),
    ] = None,
    concurrency: Annotated[
        Optional[int], typer.Option("--concurrency", min=1, help="Sequences at a time; without it, as many as fit.")
    ] = None,
    machine_hour: Annotated[
        Optional[str], typer.Option("--machine-hour", help="What an hour of one device costs, such as 2.50.")
    ] = None,
    watts: Annotated[
        Optional[float], typer.Option("--watts", min=0.0, help="Power of one device; without it, the catalogue's.")
    ] = None,
    *,
    as_json: JsonFlag = False,
) -> None:
    """Plan memory, speed, cost and energy from a model's config alone. Exit code 1 if it cannot work."""
    from enginehouse_builders.plan.planner import make_plan, targets_on  # noqa: PLC0415 - commands import what they use
    from enginehouse_builders.plan.reading import read_shape  # noqa: PLC0415
    from enginehouse_builders.plan.speed import Workload  # noqa: PLC0415
    from enginehouse_builders.spec.loading import load_spec  # noqa: PLC0415

    hour = None if machine_hour is None else parse_price(machine_hour, "--machine-hour")
    is_spec = path.suffix.lower() in _SPEC_SUFFIXES and not path.is_dir()
    spec = load_spec(path) if is_spec else None
    names = device or [spec.device if spec is not None and spec.device else "cpu"]
    source = Path(spec.model.source) if spec is not None else path.expanduser()
    shape = read_shape(source)
    plans = []
    for name in names:
        found = find_device(name, load_settings().cache_dir)
        asked = spec if spec is not None else _spec_of(source, found)
        usual = min(_USUAL_NUM_TOKENS, max((asked.limits.max_seq_len or shape.max_position_embeddings) // 2, 1))
        workload = Workload(input_tokens or usual, output_tokens or usual, concurrency)
        draft_model = asked.speculation.draft_model
        draft = read_shape(Path(draft_model)) if draft_model else None
        plans += [
            make_plan(asked, shape, found, target, workload, machine_hour=hour, watts=watts, draft=draft)
            for target in targets_on(asked, found)
        ]
    if as_json:
        print_json([one.to_dict() for one in plans])
    else:
        typer.echo("\n\n".join(describe(one) for one in plans))
    if any(warning.severity == "error" for one in plans for warning in one.warnings):
        raise typer.Exit(EXIT_FAILED)


def find_device(name: str, cache_dir: Path) -> Device:
    """Return the device of that name; `cpu` is this host's, measured once and cached."""
    from enginehouse_builders.plan.devices import CPU, gpu  # noqa: PLC0415
    from enginehouse_builders.plan.probe import measure_cpu  # noqa: PLC0415

    return measure_cpu(cache_dir) if name.lower() == CPU else gpu(name)


def _spec_of(model: Path, device: Device) -> Spec:
    """What a bare model asks for: everything by default, for the device's own target."""
    from enginehouse_builders.spec.model import Spec  # noqa: PLC0415

    values: dict[str, Any] = {
        "name": re.sub(r"[^A-Za-z0-9._-]+", "-", model.resolve().stem).strip("-._") or "model",
        "model": {"source": str(model)},
        "targets": ["cpu" if device.is_cpu else "tensorrt_llm"],
    }
    return Spec.model_validate(values)


def describe(plan: Plan) -> str:
    """Return a plan as text for a terminal."""
    from enginehouse_builders.plan.advice import gb  # noqa: PLC0415

    memory, request, speed, cost = plan.memory, plan.request, plan.speed, plan.cost
    ranks = request.parallelism.world_size
    rows = [
        ("weights", f"{gb(memory.weights_bytes)} per rank ({request.weights.value}, {request.dtype.value})"),
        ("activations", f"{gb(memory.activations_bytes)} for {request.max_num_tokens:,} tokens a step"),
        ("runtime", gb(memory.runtime_bytes)),
    ]
    if memory.draft_bytes:
        rows.append(("draft model", gb(memory.draft_bytes)))
    rows += [
        ("KV cache", f"{gb(memory.kv_pool_bytes)}, {memory.kv_bytes_per_token:,} bytes a token ({request.kv.value})"),
        (
            "fits at a time",
            ", ".join(f"{num:,} of {length:,} tokens" for length, num in plan.sequences_by_length.items() if num)
            or "none",
        ),
    ]
    if speed is not None:
        alone = f"{speed.single_tokens_per_s:,.0f} tokens/s for one alone"
        step = f" ({speed.decode_step_s * 1e3:,.1f} ms a step, bound by {speed.decode_bound_by})"
        rows += [
            ("prefill", f"{speed.prefill_tokens_per_s:,.0f} tokens/s; first token after {speed.ttft_s * 1e3:,.0f} ms"),
            (
                "decode",
                f"{speed.decode_tokens_per_s:,.0f} tokens/s with {speed.num_sequences} at a time{step}; {alone}",
            ),
            ("under load", f"{speed.output_tokens_per_s:,.0f} output tokens/s, prompts included"),
        ]
        money = _amount(cost.per_million_output_tokens_with_prompts, cost.currency)
        split = f"input {_amount(cost.per_million_input_tokens, cost.currency)}, "
        split += f"output {_amount(cost.per_million_output_tokens, cost.currency)} alone"
        hour = f"{cost.machine_hour} {cost.currency} an hour: {cost.source}" if cost.machine_hour is not None else ""
        known = f"{money} per million output tokens with their prompts ({split}; {hour})" if hour else "unknown"
        rows.append(("cost", known))
        joules = plan.joules_per_output_token
        rows.append(
            ("energy", "unknown (--watts)" if joules is None else f"{joules:.3g} J per output token at full power")
        )
    title = f"{plan.model} on {f'{ranks} x ' if ranks > 1 else ''}{plan.device.name} ({plan.target})"
    title += (
        f": {plan.num_params / 1e9:.2f} billion values, prompts of {plan.workload.num_input_tokens:,} and answers of "
    )
    lines = [f"{title}{plan.workload.num_output_tokens:,} tokens"]
    lines += [f"  {label:<15} {text}" for label, text in rows]
    lines += [f"  {one.severity}: {one.message}\n    -> {one.advice}" for one in plan.warnings]
    return "\n".join(lines)


def _amount(amount: Decimal | None, currency: str) -> str:
    return "unknown" if amount is None else f"{amount.quantize(Decimal('0.0001')).normalize():f} {currency}"
