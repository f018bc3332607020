"""The `enginehouse` command."""
