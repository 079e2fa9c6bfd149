"""Kernels of devices, a folder each."""
