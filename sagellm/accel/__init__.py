"""Modules that make the engine faster without changing what it says."""
