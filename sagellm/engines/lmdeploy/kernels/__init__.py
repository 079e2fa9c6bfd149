"""Triton kernels for GPUs; importing one needs Triton, so nothing is imported here."""
