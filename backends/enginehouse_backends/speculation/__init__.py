"""Speculative decoding: who proposes drafts, and how many are worth verifying."""
