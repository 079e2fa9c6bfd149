"""Texts, GGUF files and measures of quality of models."""
