"""Prompts on one LMDeploy engine, decoding on another: each engine's side of it."""
