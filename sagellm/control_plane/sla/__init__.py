"""Profiles of engines under load, and plans that keep to latency targets."""
