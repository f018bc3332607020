"""The backends: tokenization, the CPU engine, and the Triton models that serve them."""
