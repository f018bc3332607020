"""Promotion: which release serves, how that changes, and how a change that was cut short is found and ended."""
