"""Kinds of engines, one file each."""
