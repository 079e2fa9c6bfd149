"""Prefill/decode groups under test: real engines behind a real proxy, on this host."""
