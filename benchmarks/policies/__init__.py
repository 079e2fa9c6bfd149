"""Eviction policies beside those of others, on the same requests."""
