"""Several services on one host under a memory budget: which engines are loaded, and when they go."""
