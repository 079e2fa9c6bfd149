"""Sparse attention: policies that choose which KV blocks a decode step reads."""
