"""Every native policy makes the decisions of its plain twin, in a flat cache and in a replay with prefixes."""

import numpy as np
import pytest

from sagellm import _core
from sagellm.kv_policy import make_policy, policy_names
from sagellm.kv_policy.object_cache import ReferenceObjectCache
from sagellm.replay.prefix import replay_prefix_reference

NAMES = [name for name in policy_names() if name != "belady"]
TOTALS = ("retries", "retry_hit_blocks", "retry_blocks", "num_evicted", "num_evicted_soon", "num_preempted", "num_oversized")


def zipf(seed: int, count: int, objects: int) -> np.ndarray:
    random = np.random.default_rng(seed)
    weights = 1.0 / np.arange(1, objects + 1)
    return random.choice(objects, count, p=weights / weights.sum()).astype(np.uint64)


def forest(seed: int, requests: int, width: int, depth: int) -> tuple[np.ndarray, np.ndarray]:
    """(keys, offsets): paths through trees; those of a tree's upper part come again and again."""
    random = np.random.default_rng(seed)
    rows = []
    for _ in range(requests):
        length, key = int(random.integers(1, depth + 1)), 0
        row = []
        for _ in range(length):
            key = (key * (width + 1) + 1 + int(random.zipf(1.5)) % width) % (1 << 61)
            row.append(key)
        rows.append(row)
    keys = np.array([key for row in rows for key in row], np.uint64)
    return keys, np.cumsum([0, *map(len, rows)])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("capacity", [1, 2, 3, 7, 20, 64, 150])
def test_flat(name, capacity):
    for seed, objects in ((1, 40), (2, 300)):
        keys = zipf(seed, 2_000, objects)
        twin = ReferenceObjectCache(make_policy(name, capacity, reference=True), capacity)
        assert _core.replay_objects(name, capacity, keys).tolist() == twin.access_many(keys).tolist()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("running, outputs", [(1, False), (3, False), (4, True)])
def test_prefixes(name, running, outputs):
    for seed, capacity in ((1, 12), (2, 30), (3, 31), (4, 100)):
        keys, offsets = forest(seed, 400, 4, 9)
        answers = np.random.default_rng(seed).integers(0, 4, 400).astype(np.int32) if outputs else None
        found = _core.replay_prefix(name, capacity, keys, offsets, running=running, output_blocks=answers)
        twin = replay_prefix_reference(
            make_policy(name, capacity, reference=True), keys, offsets, capacity=capacity, running=running,
            output_blocks=answers,
        )  # fmt: skip
        assert found.hit_blocks.tolist() == twin.hit_blocks.tolist()
        for total in TOTALS:
            assert int(np.sum(getattr(found, total))) == int(np.sum(getattr(twin, total))), total
