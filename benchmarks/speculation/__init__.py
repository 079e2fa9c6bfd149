"""Models, texts and contestants for `benchmarks.speculate`."""
