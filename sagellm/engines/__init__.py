"""Adapters from the engine-neutral contracts of `sagellm.core` to real engines."""
