"""The policies in C++ behind the contract: what they refuse. Their decisions: `test_twins`, `test_native_and_twin`."""

import pytest

from sagellm.core.errors import PolicyError
from sagellm.kv_policy.base import BlockKey, CachedBlock, PolicyContext
from sagellm.kv_policy.eviction.native import NATIVE
from tests.kv_policy.flat import Flat


def test_bad_events_are_refused_and_change_nothing():
    flat = Flat(NATIVE["lru"](3)).insert(1, 2)
    with pytest.raises(PolicyError, match="block 1 is on the tier already; tell on_remove"):
        flat.policy.on_insert(CachedBlock(BlockKey(1)))
    for event in (flat.policy.on_hit, flat.policy.on_remove):
        with pytest.raises(PolicyError, match="block 9 is not on the tier; tell on_insert"):
            event(BlockKey(9))
    del flat.pins[1]
    with pytest.raises(KeyError):  # the owner says that it has not what it told
        flat.ask()
    flat.pins[1] = 0
    assert flat.pin(2).victims(2) == [1]


@pytest.mark.parametrize("name", [name for name in NATIVE if name != "belady"])
@pytest.mark.parametrize("asked", ["is_evictable", "take"])
def test_nothing_is_told_or_asked_while_a_question_is_open(name: str, asked: str):
    flat = Flat(NATIVE[name](10)).insert(*range(10)).hit(0, 1, 1)
    calls = [
        lambda: flat.policy.select_victims(PolicyContext(2, flat)),
        lambda: flat.policy.on_remove(BlockKey(5)),
        lambda: flat.policy.on_hit(BlockKey(5)),
        lambda: flat.policy.on_insert(CachedBlock(BlockKey(99))),
    ]

    class Nosy(PolicyContext):
        def is_evictable(self, key):
            if asked == "is_evictable":
                refused_all()
            return super().is_evictable(key)

        def take(self, key, reason):
            if asked == "take":
                refused_all()
            return super().take(key, reason)

    def refused_all() -> None:
        for call in calls:
            with pytest.raises(PolicyError, match="has a question open"):
                call()

    victims = flat.policy.select_victims(Nosy(3, flat)).victims
    assert len(victims) == 3 and set(flat.victims(10)) == set(range(10))
