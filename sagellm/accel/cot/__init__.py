"""Chains of thought: steps are guessed from earlier chains, verified in the engine's passes, and voted on."""
