"""In-flight batching over a paged KV cache, on OpenVINO."""
