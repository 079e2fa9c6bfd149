"""Keys that are accessed with the frequencies of a Zipf distribution."""

import numpy as np


def zipf(seed: int, count: int, num_objects: int) -> np.ndarray:
    """Return uint64 [count], of integers below `num_objects`."""
    weights = 1 / np.arange(1, num_objects + 1)
    return np.random.default_rng(seed).choice(num_objects, count, p=weights / weights.sum()).astype(np.uint64)
