"""Blocks on tiers: the engine's pool, memory of the host, files; who may hold them, and how their bytes move."""
