"""Prompts on one engine, decoding on another: who does what, where the keys and values go, and what happens when one fails."""
