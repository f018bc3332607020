from enginehouse_backends.triton.bls_model import TritonPythonModel

__all__ = ["TritonPythonModel"]
