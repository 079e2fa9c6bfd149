"""Who runs next, and with how much: one strategy a file."""
