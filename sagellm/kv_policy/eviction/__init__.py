"""Which block goes: one policy a file, in plain Python, and the native ones."""
