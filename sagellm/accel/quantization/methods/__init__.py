"""Quantization methods, one file each. A new file with a class that has a `name` is found."""
