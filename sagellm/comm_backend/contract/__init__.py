"""Checks of the rules that every communication backend must keep; users can run them on their own."""
