"""Speculative decoding: strategies that guess tokens, and what is needed to choose, check and measure them."""
