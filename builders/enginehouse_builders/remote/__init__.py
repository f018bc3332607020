"""Remote stores of builds, by fsspec URL: push, pull, and a local copy whose every digest was checked."""
