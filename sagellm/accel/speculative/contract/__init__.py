"""Contract of speculative strategies, and of an engine that verifies their guesses."""
