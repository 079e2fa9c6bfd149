"""A native policy and its plain twin decide alike: question by question, in a flat cache, and in a replay of prefixes."""

import numpy as np
import pytest

from sagellm import _core
from sagellm.kv_policy import EvictionPolicy, PolicyContext, make_policy, policy_names
from sagellm.kv_policy.contract.scenarios import play
from sagellm.kv_policy.contract.world import World
from sagellm.kv_policy.object_cache import ReferenceObjectCache
from sagellm.replay.prefix import replay_prefix_reference
from tests.kv_policy.access import zipf
from tests.sweeps import slow_but

NAMES = [name for name in policy_names() if name != "belady"]
TOTALS = ("retries", "retry_hit_blocks", "retry_blocks", "num_evicted", "num_evicted_soon", "num_preempted", "num_oversized")


class Both(EvictionPolicy):
    """Tells both and asks both; the twin's answer counts."""

    name = "both"

    def __init__(self, name, capacity):
        super().__init__(capacity)
        self.twin, self.native = make_policy(name, capacity, reference=True), make_policy(name, capacity)
        self.num_questions = 0

    def on_insert(self, block):
        self.twin.on_insert(block)
        self.native.on_insert(block)

    def on_hit(self, key, time_s=0.0):
        self.twin.on_hit(key, time_s)
        self.native.on_hit(key, time_s)

    def on_remove(self, key, evicted=True):
        self.twin.on_remove(key, evicted)
        self.native.on_remove(key, evicted)

    def select_victims(self, context):
        again = PolicyContext(context.count, context._blocks, incoming=context.incoming, time_s=context.time_s)
        decision, other = self.twin.select_victims(context), self.native.select_victims(again)
        self.num_questions += 1
        assert (decision.victims, decision.reasons) == (other.victims, other.reasons), f"question {self.num_questions}"
        return decision


@pytest.mark.parametrize("name", NAMES)
def test_they_answer_alike(name):
    for capacity in (1, 5, 24):
        for seed in range(3):
            both = Both(name, capacity)
            faults = []
            play(World(both, capacity, seed, lambda rule, message, faults=faults: faults.append((rule, message))), 150)
            assert faults == [] and both.num_questions > 50


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


@pytest.mark.parametrize("name", policy_names())
@pytest.mark.parametrize("capacity", slow_but([1, 2, 3, 7, 20, 64, 150], 1, 20))
def test_flat(name, capacity):
    """The native flat cache has its own queues; the plain one asks the policy behind the contract, native or not."""
    for seed, num_objects in ((1, 40), (2, 300)):
        keys = zipf(seed, 2_000, num_objects)
        options = {"future": keys} if name == "belady" else {}
        hits = _core.replay_objects(name, capacity, keys).tolist()
        for reference in (False, True):
            policy = make_policy(name, capacity, reference=reference, **options)
            assert ReferenceObjectCache(policy, capacity).access_many(keys).tolist() == hits


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("running, outputs, soon", slow_but([(1, False, None), (3, False, 5), (4, True, 40)], (4, True, 40)))
def test_prefixes(name, running, outputs, soon):
    for seed, capacity in ((1, 12), (2, 30), (3, 31), (4, 100)):
        keys, offsets = forest(seed, 400, 4, 9)
        answers = np.random.default_rng(seed).integers(0, 4, 400).astype(np.int32) if outputs else None
        found = _core.replay_prefix(name, capacity, keys, offsets, running=running, soon=soon, output_blocks=answers)
        twin = replay_prefix_reference(
            make_policy(name, capacity, reference=True), keys, offsets, capacity=capacity, running=running,
            soon=soon, output_blocks=answers,
        )  # fmt: skip
        assert found.hit_blocks.tolist() == twin.hit_blocks.tolist()
        for total in TOTALS:
            assert int(np.sum(getattr(found, total))) == int(np.sum(getattr(twin, total))), total
        assert found.num_evicted > 50 and (not outputs or capacity > 12 or found.num_preempted > 0)
