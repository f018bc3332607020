"""README.md of a generated folder: what it is and how it is run by hand."""

from __future__ import annotations

from typing import TYPE_CHECKING

from enginehouse_builders.targets.emitted import CONTAINER_IMAGE, ENGINE_VERSION, SCRIPT_FILE

if TYPE_CHECKING:
    from enginehouse_builders.spec.model import Spec
    from enginehouse_builders.targets.emitted import TargetPlan

_WHAT = {
    "tensorrt_llm": f"builds a TensorRT-LLM {ENGINE_VERSION} engine",
    "tensorrt_llm_pytorch": "gathers a model for TensorRT-LLM's LLM API (1.2 or newer)",
}


def render_readme(spec: Spec, plan: TargetPlan) -> str:
    """Return the README of *plan*'s folder; it names no path of this host."""
    options = list(plan.folders)
    mounts = " \\\n".join(f"  -v /path/to/{o.removeprefix('--')}:/inputs/{o.removeprefix('--')}:ro" for o in options)
    arguments = " ".join(f"{option} /inputs/{option.removeprefix('--')}" for option in options)
    by_hand = " ".join(f"{option} DIR" for option in options)
    limits = plan.limits
    return f"""# {spec.name}: {plan.target}

`{SCRIPT_FILE}` {_WHAT[plan.target]}. It needs nothing of Enginehouse and can be read from top to bottom.

| | |
|---|---|
| weights | {plan.weight_precision} |
| KV cache | {plan.kv_precision} |
| GPUs | {spec.parallelism.world_size} (tensor {spec.parallelism.tensor}, pipeline {spec.parallelism.pipeline}) |
| sequences, input, sequence length, tokens per step | {limits.max_batch_size}, {limits.max_input_len}, \
{limits.max_seq_len}, {limits.max_num_tokens} |

In the container it was written for, from this folder:

```sh
docker run --rm --gpus all --ipc host --ulimit memlock=-1 \\
{mounts} \\
  -v "$PWD":/target \\
  {CONTAINER_IMAGE} \\
  python3 /target/{SCRIPT_FILE} {arguments}
```

On a host that has TensorRT-LLM:

```sh
python3 {SCRIPT_FILE} {by_hand}
```

The result is `engine/`, with Enginehouse's `manifest.json`. Build on the kind of GPU that will serve.
{_serving(spec, plan)}
These arguments were checked against the recorded API of TensorRT-LLM {ENGINE_VERSION}; they were run on no GPU.
"""


def _serving(spec: Spec, plan: TargetPlan) -> str:
    if plan.target == "tensorrt_llm_pytorch":
        return (
            "\n`engine/triton/tensorrt_llm` is the Triton model: copy it into a model repository and set its\n"
            "parameter `gpt_model_path` to the absolute path of `engine/`.\n"
        )
    draft = ""
    if spec.speculation.method.value == "draft_target":
        draft = "The draft model is an engine of its own: build it from a spec without speculation.\n"
    return (
        "\n`engine/triton/tensorrt_llm/config.pbtxt` serves it with NVIDIA's backend: replace `${engine_dir}`.\n"
        "`engine/serving_parameters.json` has the parameters in it that the spec decides.\n" + draft
    )
