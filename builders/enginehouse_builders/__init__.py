"""Builders: from a model and a few options to a recorded, immutable build."""
