"""Contestants in environments of their own, as the comparisons with other projects run them."""
