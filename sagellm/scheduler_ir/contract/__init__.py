"""Checks of the rules that every strategy must keep; users can run them on their own."""
