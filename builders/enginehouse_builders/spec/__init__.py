"""The declarative spec that asks for an engine."""
