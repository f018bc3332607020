"""The Triton Python models, and the one fence between them and the server's sharp edges."""
