"""GPU targets: what NVIDIA's TensorRT-LLM is asked to do, as a generated script that anyone can read and run.

``tensorrt_llm`` compiles an engine with TensorRT-LLM 1.2.1, the last version that has engines;
``tensorrt_llm_pytorch`` serves the model's own weights through the LLM API of 1.2 and newer.
"""
