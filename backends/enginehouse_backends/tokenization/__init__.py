"""Text to token ids and back: templates, limits, word lists, incremental detokenization."""
