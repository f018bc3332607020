from enginehouse_backends.triton.postprocessing import TritonPythonModel

__all__ = ["TritonPythonModel"]
