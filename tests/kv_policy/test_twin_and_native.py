"""A native policy and its twin in plain Python answer every question alike: victims, order and reasons."""

import pytest

from sagellm.kv_policy import EvictionPolicy, PolicyContext, find_policy, make_policy, policy_names
from sagellm.kv_policy.contract.scenarios import play
from sagellm.kv_policy.contract.world import World

NAMES = [
    name for name in policy_names()
    if name != "belady" and find_policy(name) is not find_policy(name, reference=True)
]  # fmt: skip


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
        for seed in range(6):
            both = Both(name, capacity)
            faults = []
            play(World(both, capacity, seed, lambda rule, message, faults=faults: faults.append((rule, message))), 150)
            assert faults == [] and both.num_questions > 50
