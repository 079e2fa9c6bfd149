"""Measures how well a model is computed: perplexity, distance to a reference, greedy answers that stay the same."""
