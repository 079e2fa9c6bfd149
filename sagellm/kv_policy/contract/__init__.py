"""Checks of the rules that every eviction policy must keep; users can run them on their own."""
