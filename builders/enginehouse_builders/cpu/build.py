"""Building an engine for the CPU: from a GGUF file or a Hugging Face folder to a folder in the store."""

from __future__ import annotations

import json
import platform
import shutil
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, Final, cast

from enginehouse_builders.cpu.engine_folder import TOKENS_PER_BLOCK, chat_template_sha256, engine_config, resolve_limits
from enginehouse_builders.cpu.inputs import (
    TARGET,
    calibration_samples,
    deciding_inputs,
    open_source,
    samples_sha256,
    tool_versions,
)
from enginehouse_builders.cpu.options import KV_PRECISIONS, BuildOptions, spec_of
from enginehouse_builders.cpu.source import INT4_GROUP_SIZE
from enginehouse_builders.digests import source_digest
from enginehouse_builders.pipeline import OUT, StepResult, Workspace, run_steps, workspace
from enginehouse_builders.pipeline_failure import explain
from enginehouse_builders.provenance import PROVENANCE_FILE, build_id_of, statement
from enginehouse_builders.spec.model import Limits, Spec
from enginehouse_builders.store import folder_of, is_sound, publish
from enginehouse_contract.errors import EnginehouseError, ModelSourceError, refusal
from enginehouse_contract.manifest import (
    CONFIG_FILE,
    MANIFEST_FILE,
    MODEL_FILE,
    TOKENIZER_CONFIG_FILE,
    TOKENIZER_FILE,
    WEIGHTS_FILE,
    FileRecord,
    Manifest,
    read_manifest,
    sha256_of_file,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import openvino as ov

    from enginehouse_builders.cpu.weights import WeightPrecision
    from enginehouse_builders.pipeline import Progress

    Share = Callable[[float], None]

__all__ = ["KV_PRECISIONS", "TOKENS_PER_BLOCK", "BuildOptions", "BuildResult", "build_engine"]

SPEC_FILE: Final = "spec.json"
_DIGESTS_FILE: Final = ".source-digests.json"
_CONVERTED: Final = "converted"  # weights that are still to be quantized, within the work folder


@dataclass(frozen=True, slots=True)
class BuildResult:
    """A build in the store, and whether it was there before."""

    build_dir: Path
    manifest: Manifest
    cached: bool


def build_engine(
    options: BuildOptions, store_dir: Path, progress: Progress | None = None, *, logs_dir: Path | None = None
) -> BuildResult:
    """Build *options* into *store_dir*, go on with what an earlier try left, or find it there.

    *progress* is called with a step and the share of the whole that is done; the log of a finished build goes to
    *logs_dir* (default: ``logs/builds`` beside the store).

    Raises :class:`ModelSourceError` for a model that cannot be built from, :class:`ConfigurationError` for limits that
    it cannot have, :class:`BuildError` when the build cannot be made or written. After a step failed, the message names
    its log and a script that fails the same way.
    """
    report = progress or (lambda _step, _share: None)
    report("plan", 0.0)
    build = _CpuBuild(options, store_dir)
    build_dir = folder_of(store_dir, build.build_id)

    def waiting() -> None:
        report("waiting for another build of the same", 0.0)

    with workspace(store_dir, build.build_id, lambda: is_sound(build_dir), waiting) as work:
        if work is not None:
            try:
                run_steps(work, build.actions(work), report)
            except EnginehouseError as error:
                raise explain(error, work, build.portable_spec(options.model.absolute())) from error
            _keep_log(work, (logs_dir or store_dir.parent / "logs" / "builds") / f"{build_dir.name}.log")
            publish(work.out, build_dir)
    report("done" if work is not None else "cached", 1.0)
    return BuildResult(build_dir, read_manifest(build_dir), cached=work is None)


class _CpuBuild:
    """One build: what it is made of, and its steps."""

    def __init__(self, options: BuildOptions, store_dir: Path) -> None:
        if not options.model.exists():
            raise ModelSourceError(f"{options.model} does not exist; give a GGUF file or a Hugging Face folder.")
        self._options = options
        self._store_dir = store_dir
        sha256 = source_digest(options.model, store_dir / _DIGESTS_FILE)
        if options.source_sha256 not in {None, sha256}:
            problem = "is not the digest of the model"
            hint = "The model was changed or is another one; correct the spec, or fetch the model again."
            raise ModelSourceError(
                refusal("model.sha256", problem, given=f"{options.source_sha256}, found {sha256}", hint=hint)
            )
        self._source = open_source(options.model, sha256)
        self._name = options.name or self._source.name
        self._limits = resolve_limits(options, self._source.architecture)
        if options.is_data_aware and self._source.kind == "gguf":
            problem = "needs the unquantized Hugging Face folder, not a GGUF file"
            raise ModelSourceError(refusal("weight_precision", problem, given=options.weight_precision))
        self._samples = calibration_samples(options) if options.is_data_aware else []
        self._versions = tool_versions(options, self._source)
        self._inputs = deciding_inputs(options, self._source, self._name, self._limits, self._versions, self._samples)
        self.build_id = build_id_of(self._inputs)

    def portable_spec(self, source: Path | str) -> dict[str, Any]:
        """Return the spec of exactly this build, with its model at *source*."""
        sha256 = self._source.sha256
        limits = Limits(**asdict(self._limits))
        spec = spec_of(self._options, name=self._name, source=str(source), sha256=sha256, limits=limits)
        return spec.model_dump(mode="json", exclude={"gates", "costs", "device"}, exclude_none=True)

    def actions(self, work: Workspace) -> dict[Any, Callable[[Share], StepResult]]:
        """Return the steps as functions over a work folder."""
        return {
            "plan": lambda _share: self._plan(work),
            "fetch": lambda _share: self._fetch(work),
            "convert": lambda share: self._convert(work, share),
            "quantize": lambda share: self._quantize(work, share),
            "compile": lambda _share: self._compile(work),
            "record": lambda _share: self._record(work),
        }

    def _plan(self, work: Workspace) -> StepResult:
        arch, limits = self._source.architecture, self._limits
        work.log(f"id {self.build_id}\ninputs {json.dumps(self._inputs, sort_keys=True)}")
        work.log(f"python {platform.python_version()} on {sys.platform} {platform.machine()}")
        return StepResult(
            f"{arch.class_name}, {arch.num_layers} layers of {arch.hidden_size}; "
            f"weights {self._options.weight_precision}, KV {self._options.kv_precision}; "
            f"{limits.max_batch_size} sequences of up to {limits.max_seq_len} tokens; {self._planned_bytes()}"
        )

    def _planned_bytes(self) -> str:
        from enginehouse_builders.plan.memory import kv_bytes_per_token  # noqa: PLC0415 - a cache hit does without
        from enginehouse_builders.plan.reading import read_shape  # noqa: PLC0415
        from enginehouse_builders.plan.request import memory_request  # noqa: PLC0415
        from enginehouse_builders.plan.weights import weights_bytes_per_rank  # noqa: PLC0415

        try:
            shape = read_shape(self._options.model)
        except ModelSourceError as error:  # a model that only optimum-intel knows
            return f"bytes not planned ({error})"
        request = memory_request(Spec.model_validate(self.portable_spec(self._options.model)), shape, TARGET)
        weights_bytes, kv_bytes = sum(weights_bytes_per_rank(shape, request)), kv_bytes_per_token(shape, request)
        return f"planned: {weights_bytes / 1e6:.1f} MB of weights, {kv_bytes / 1e3:.1f} kB of KV cache per token"

    def _fetch(self, work: Workspace) -> StepResult:
        texts = self._source.tokenizer_files()
        config = engine_config(self._options, self._source.architecture, self._limits)
        texts[CONFIG_FILE] = _to_json(config)
        texts[SPEC_FILE] = _to_json(self.portable_spec(self._options.model.name))
        for name, text in texts.items():
            (work.out / name).write_text(text, encoding="utf-8")
        detail = f"{self._source.kind} {self._options.model.name}, SHA-256 {self._source.sha256}"
        return StepResult(detail, tuple(f"{OUT}/{name}" for name in sorted(texts)))

    def _convert(self, work: Workspace, share: Share) -> StepResult:
        from enginehouse_builders.cpu.model_files import write_model  # noqa: PLC0415 - a cache hit does without

        precision = "as_in_file" if self._options.is_data_aware else self._options.weight_precision
        folder = _CONVERTED if self._options.is_data_aware else OUT
        model = self._converted(cast("WeightPrecision", precision), share)
        num_bytes = write_model(model, work.folder / folder / MODEL_FILE, self._store_dir)
        detail = f"{num_bytes / 1e6:.1f} MB of constants, weights {precision}"
        return StepResult(detail, _model_outputs(folder))

    def _converted(self, precision: WeightPrecision, share: Share) -> ov.Model:
        from enginehouse_builders.cpu.export import export_decoder  # noqa: PLC0415 - a cache hit does without
        from enginehouse_builders.cpu.graph import build_decoder  # noqa: PLC0415

        group_size = self._options.int4_group_size or INT4_GROUP_SIZE
        if self._source.why_not_by_hand is not None:
            reason = self._source.why_not_by_hand
            return export_decoder(self._options.model, precision, reason, int4_group_size=group_size)
        return build_decoder(
            self._source, precision, lambda fraction: share(0.9 * fraction), int4_group_size=group_size
        )

    def _quantize(self, work: Workspace, share: Share) -> StepResult:
        options = self._options
        if not options.is_data_aware:
            return StepResult(
                "no data is needed: weights were quantized, matrix by matrix, as they were converted", skipped=True
            )
        import openvino as ov  # noqa: PLC0415 - a cache hit does without

        from enginehouse_builders.cpu.data_aware import quantize  # noqa: PLC0415
        from enginehouse_builders.cpu.model_files import write_model  # noqa: PLC0415

        assert options.int4_group_size is not None, "data-aware precisions are int4"
        model = quantize(
            ov.Core().read_model(work.folder / _CONVERTED / MODEL_FILE),
            options.weight_precision,
            options.int4_group_size,
            self._samples,
            options.calibration.max_sample_tokens,
            work.out / TOKENIZER_FILE,
            share,
        )
        num_bytes = write_model(model, work.out / MODEL_FILE, self._store_dir)
        detail = f"{options.weight_precision} over {len(self._samples)} samples, {num_bytes / 1e6:.1f} MB of constants"
        return StepResult(detail, _model_outputs(OUT))

    def _compile(self, work: Workspace) -> StepResult:
        from enginehouse_builders.cpu.model_files import check_paged  # noqa: PLC0415 - a cache hit does without

        num_layers = check_paged(work.out / MODEL_FILE)
        return StepResult(f"paged attention in {num_layers} layers; kernels are chosen where the build is loaded")

    def _record(self, work: Workspace) -> StepResult:
        prefix = f"{OUT}/"
        files = {
            name.removeprefix(prefix): record for name, record in work.outputs().items() if name.startswith(prefix)
        }
        materials = {self._options.model.name: self._source.sha256}
        if self._options.is_data_aware:
            materials["calibration samples"] = samples_sha256(self._samples)
        found = statement(
            inputs=self._inputs,
            spec=self.portable_spec(self._options.model.name),
            materials=materials,
            files=files,
            versions=self._versions,
        )
        path = work.out / PROVENANCE_FILE
        path.write_text(_to_json(found), encoding="utf-8")
        files[PROVENANCE_FILE] = FileRecord(path.stat().st_size, sha256_of_file(path))
        for stray in sorted(work.out.iterdir()):
            if stray.name not in files and stray.name != MANIFEST_FILE:
                stray.unlink()  # of a step that was killed while it wrote
        manifest = Manifest(
            build_id=self.build_id,
            target=TARGET,
            model_name=self._name,
            source=self._inputs["source"],
            weight_precision=self._options.weight_precision,
            kv_precision=self._options.kv_precision,
            limits=self._limits,
            tool_versions={**self._versions, "python": platform.python_version()},
            tokenizer_sha256=files[TOKENIZER_FILE].sha256,
            chat_template_sha256=chat_template_sha256(work.out / TOKENIZER_CONFIG_FILE),
            files=dict(sorted(files.items())),
            created_at=datetime.now(tz=timezone.utc).isoformat(timespec="seconds"),
        )
        (work.out / MANIFEST_FILE).write_text(manifest.to_json(), encoding="utf-8")
        num_bytes = sum(record.num_bytes for record in files.values())
        return StepResult(
            f"{len(files)} files, {num_bytes / 1e6:.1f} MB", (prefix + PROVENANCE_FILE, prefix + MANIFEST_FILE)
        )


def _model_outputs(folder: str) -> tuple[str, str]:
    return f"{folder}/{MODEL_FILE}", f"{folder}/{WEIGHTS_FILE}"


def _keep_log(work: Workspace, path: Path) -> None:
    with suppress(OSError):  # the build matters more than its log
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(work.folder / "build.log", path)


def _to_json(value: dict[str, Any]) -> str:
    return json.dumps(value, indent=2, sort_keys=True) + "\n"
