"""`leaf_first` against the naive rule it abbreviates, and the small types of the contract."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sagellm.core.errors import PluginError
from sagellm.core.hooks import (
    DECISIONS,
    NOTICES,
    BlockCounts,
    MigrationPlan,
    Plugin,
    ScheduleDecision,
    Tier,
    VictimRequest,
    overrides,
)


def request_of(parents, access, on_device, count):
    ids = np.array([10 + 3 * row for row in range(len(parents))], np.int64)
    parent_ids = np.array([-1 if p < 0 else ids[p] for p in parents], np.int64)
    depth = np.zeros(len(parents), np.int64)
    for row, parent in enumerate(parents):
        depth[row] = 16 + (depth[parent] if parent >= 0 else 0)
    return VictimRequest(
        count, ids, parent_ids.reshape(-1), np.array(access, np.int64), depth, np.array(on_device, bool)
    )  # fmt: skip


def naive(request, keys):
    """Again and again the block on the device with the smallest key that has none on the device below it, and with it
    what was offloaded below it."""
    size = len(request.block_ids)
    row_of = {int(block): row for row, block in enumerate(request.block_ids)}
    parent = [row_of.get(int(block), -1) for block in request.parent_ids]

    def is_below(row, top):
        while row >= 0 and row != top:
            row = parent[row]
        return row == top

    left, victims, freed = set(range(size)), [], 0
    while freed < request.count:
        below = {row: [r for r in left if r != row and is_below(r, row)] for row in left if request.on_device[row]}
        free = [row for row, under in below.items() if not any(request.on_device[r] for r in under)]
        if not free:
            break
        row = min(free, key=lambda row: (keys[row], row))
        gone = [*sorted(below[row], key=lambda r: -request.depth[r]), row]
        left -= set(gone)
        victims.append(sorted(int(request.block_ids[r]) for r in gone))
        freed += 1
    return victims


def grouped(request, victims):
    """Victims in groups that end with the block on the device, each group sorted: the order within is free."""
    on_device = dict(zip(request.block_ids.tolist(), request.on_device.tolist(), strict=True))
    groups, group = [], []
    for block in victims:
        group.append(block)
        if on_device[block]:
            groups.append(sorted(group))
            group = []
    assert not group, "an offloaded block goes with the one above it, before it"
    return groups


@st.composite
def requests(draw):
    size = draw(st.integers(0, 25))
    parents = [draw(st.integers(-1, row - 1)) for row in range(size)]
    access = [draw(st.integers(0, 8)) for _ in range(size)]
    on_device = [draw(st.booleans()) for _ in range(size)]
    return request_of(parents, access, on_device, draw(st.integers(0, size + 2)))


@settings(max_examples=300, deadline=None)
@given(requests(), st.randoms(use_true_random=False))
def test_leaf_first_is_the_naive_rule(request, random):
    assert grouped(request, request.leaf_first()) == naive(request, request.last_access)
    keys = np.array([random.random() for _ in request.block_ids])
    assert grouped(request, request.leaf_first(keys)) == naive(request, keys)


@settings(max_examples=200, deadline=None)
@given(requests())
def test_victims_hold_every_child_and_free_enough(request):
    victims = request.leaf_first()
    chosen = set(victims)
    assert len(chosen) == len(victims)
    position = {block: index for index, block in enumerate(victims)}
    for block, parent in zip(request.block_ids.tolist(), request.parent_ids.tolist(), strict=True):
        if parent in chosen:
            assert position[block] < position[parent]
    freed = int(request.on_device[[row for row, b in enumerate(request.block_ids) if int(b) in chosen]].sum())
    assert freed == min(request.count, int(request.on_device.sum()))
    if victims:
        assert request.on_device[request.block_ids.tolist().index(victims[-1])]


def test_a_parent_that_is_no_candidate_ties_nothing():
    request = request_of([-1, -1], [2, 1], [True, True], 1)
    parents = np.array([999, 999], np.int64)
    request = VictimRequest(*[request.count, *request.candidates._replace(parent_ids=parents)])
    assert request.leaf_first() == [13]


def test_candidates_are_made_when_they_are_read_and_not_after_the_question():
    rows, made = request_of([-1, 0], [2, 1], [True, True], 1).candidates, []

    def make():
        made.append(1)
        return rows

    request = VictimRequest.lazy(2, make)
    assert request.count == 2 and not made
    assert request.leaf_first() == [13, 10] and request.depth.tolist() == [16, 32] and made == [1]
    request.close()
    assert request.block_ids is rows.block_ids
    unread = VictimRequest.lazy(2, make)
    unread.close()
    with pytest.raises(PluginError, match="inside select_victims only"):
        unread.leaf_first()


def test_values_are_frozen():
    plan = MigrationPlan(Tier.GPU, Tier.CPU, (1, 2))
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.block_ids = ()
    assert plan == MigrationPlan(Tier("gpu"), Tier("cpu"), (1, 2))
    assert BlockCounts(4, 1, 2, 1).host_total == 0
    assert ScheduleDecision() == ScheduleDecision(None, frozenset(), None, "")


def test_a_plugin_overrides_what_its_class_brings():
    class One(Plugin):
        def admit(self, request):
            return True

    class Two(One):
        pass

    for kind in (One, Two):
        assert [hook for hook in (*DECISIONS, *NOTICES) if overrides(kind(), hook)] == ["admit"]
    with pytest.raises(TypeError, match="unknown options \\['pace'\\]"):
        One(pace=3)
