"""The CPU stand-in for NVIDIA's backend of the same name: Triton loads this file for ``backend: "tensorrtllm"``."""

from enginehouse_backends.triton.engine_model import TritonPythonModel

__all__ = ["TritonPythonModel"]
