"""Measurements. Nothing here asserts a time; tests do not run these."""
