"""The CPU target: weights from GGUF or safetensors into an OpenVINO paged-attention engine."""
