"""Checks of the rules that every KV channel must keep; users can run them on their own."""
