"""Collective libraries of other vendors: what is here of each, and process groups of those that are."""
