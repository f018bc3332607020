from enginehouse_backends.triton.preprocessing import TritonPythonModel

__all__ = ["TritonPythonModel"]
