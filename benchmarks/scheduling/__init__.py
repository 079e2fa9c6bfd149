"""Workloads for strategies, and what is measured of them, for `benchmarks.schedules`."""
