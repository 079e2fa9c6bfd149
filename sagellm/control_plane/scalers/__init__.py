"""Scaling policies. A new one is a new file here."""
