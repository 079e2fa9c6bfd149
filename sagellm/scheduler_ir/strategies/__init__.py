"""Scheduling strategies, one a file."""
