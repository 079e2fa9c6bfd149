"""Policies of sparse attention, a file each. A new file here is a new name."""
