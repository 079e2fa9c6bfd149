"""Events, decisions and their cascade, by hand and at random."""

import pytest

from sagellm.core.errors import PolicyError
from sagellm.core.hooks import MigrationPlan, MigrationResult, Tier
from sagellm.kv_runtime.hierarchy import HierarchyManager
from sagellm.kv_runtime.quota import QuotaManager
from sagellm.kv_runtime.tier_spec import TierSpec
from tests.kv_runtime.policies import Chooses, KeepsEven, Lru, make_policy
from tests.kv_runtime.workload import Engine, chain, manager_of, requests

GPU, CPU, NVME = Tier.GPU, Tier.CPU, Tier.NVME


def store(manager, *keys, request=None, release=True, **options):
    """A request computes a chain and, unless it is to go on, ends."""
    manager.backend.put(keys)
    manager.stored(request if request is not None else keys[-1], chain(*keys, **options), 1.0)
    if release:
        manager.released(request if request is not None else keys[-1], 0, 1.0)


def victims(room):
    return [key for key, _ in room.victims]


def test_a_lookup_finds_and_holds_what_is_resident():
    manager = manager_of()
    store(manager, 1, 2, 3)
    assert manager.looked_up(5, [1, 2, 3, 4], 2, 1.0) == 2, "the limit holds"
    assert manager.books.held(5) == [1, 2]
    assert manager.looked_up(5, [1, 2, 3, 4], 4, 2.0) == 3, "what it holds is not asked again"
    assert manager.counts["blocks_found"] == 3
    assert manager.make_room(GPU, 3).victims == ()
    manager.released(5, 1, 3.0)
    assert victims(manager.make_room(GPU, 3)) == [3, 2]
    manager.released(5, 0, 3.0)
    manager.released(5, 0, 3.0)
    assert victims(manager.make_room(GPU, 3)) == [3, 2, 1]


def test_another_policy_takes_over_in_the_order_of_use():
    manager = HierarchyManager([TierSpec(GPU, 4, "lru")])
    for key in (1, 2, 3):
        manager.stored(key, chain(key), 1.0)
        manager.released(key, 0, 1.0)
    manager.looked_up(4, [1], 1, 2.0)
    manager.released(4, 0, 2.0)
    assert manager.exchange_policy(GPU, "fifo", {}, 3.0) == "lru"
    manager.looked_up(5, [2], 1, 4.0)
    manager.released(5, 0, 4.0)
    assert victims(manager.make_room(GPU, 3, time_s=5.0)) == [2, 3, 1]  # by last use it would be 3, 1, 2
    with pytest.raises(PolicyError, match="there is no tier cpu here; the tiers are gpu"):
        manager.exchange_policy(CPU, "lru", {}, 6.0)
    assert manager.tiers == [TierSpec(GPU, 4, "fifo")]


def test_deciding_changes_no_books():
    manager = manager_of(cpu=2)
    store(manager, 1, 2, 3)
    assert manager.make_room(GPU, 2) == manager.make_room(GPU, 2)
    manager.books.check()
    assert manager.books.num_blocks(GPU) == 3


def test_without_a_slower_tier_victims_go():
    manager = manager_of()
    store(manager, 1, 2, 3)
    room = manager.make_room(GPU, 2, time_s=2.0)
    assert room.demote == () and room.drop == tuple((GPU, key, "least recently used") for key in (3, 2))
    manager.carry_out(room, 2.0)
    assert manager.books.num_blocks(GPU) == 1 == len(manager.books)


def test_victims_cascade_down_the_tiers():
    manager = manager_of(gpu=4, cpu=2, nvme=2)
    for root in (10, 20, 30):
        store(manager, root, root + 1)
        manager.carry_out(manager.make_room(GPU, 2), 2.0)
    store(manager, 40, 41)
    room = manager.make_room(GPU, 2)
    assert victims(room) == [41, 40]
    assert room.demote == (MigrationPlan(CPU, NVME, (31, 30)), MigrationPlan(GPU, CPU, (41, 40)))
    assert [(tier, key) for tier, key, _ in room.drop] == [(NVME, 21), (NVME, 20)]
    manager.carry_out(room, 3.0)
    assert sorted(manager.books.recency(CPU)) == [40, 41] and sorted(manager.books.recency(NVME)) == [30, 31]
    assert 10 not in manager.books


def test_policies_are_told_in_the_order_of_the_contract():
    told = []

    class Listener(Lru):
        def on_insert(self, block):
            told.append(("insert", self.capacity, block.key))
            super().on_insert(block)

        def on_hit(self, key, time_s=0.0):
            told.append(("hit", self.capacity, key))
            super().on_hit(key, time_s)

        def on_remove(self, key, evicted=True):
            told.append(("evicted" if evicted else "removed", self.capacity, key))
            super().on_remove(key, evicted)

    manager = manager_of(gpu=4, cpu=3, make_policy=lambda name, capacity: Listener(capacity))
    store(manager, 1, 2)
    assert told == [("insert", 4, 2), ("insert", 4, 1)], "deepest first"
    told.clear()
    manager.carry_out(manager.make_room(GPU, 2), 1.0)
    assert told == [("evicted", 4, 2), ("insert", 3, 2), ("evicted", 4, 1), ("insert", 3, 1)], (
        "as the victims were chosen"
    )
    told.clear()
    manager.looked_up(9, [1, 2], 2, 2.0)
    manager.moved(MigrationPlan(CPU, GPU, (1, 2)), MigrationResult((1, 2), {}), 2.0)
    assert told == [
        ("hit", 3, 2), ("hit", 3, 1), ("removed", 3, 2), ("insert", 4, 2), ("removed", 3, 1), ("insert", 4, 1),
    ]  # fmt: skip
    told.clear()
    manager.released(9, 0, 3.0)
    manager.dropped(GPU, [2], 3.0, evicted=False)
    manager.dropped(GPU, [1, 1], 3.0)
    assert told == [("removed", 4, 2), ("evicted", 4, 1)]


def test_a_block_with_a_copy_below_is_not_written_again():
    manager = manager_of(gpu=4, cpu=2, nvme=4)
    store(manager, 1, 2)
    manager.carry_out(manager.make_room(GPU, 2), 1.0)
    manager.saving([1, 2], 1.0)
    assert manager.backend.save([1, 2], NVME, 1.0).result().moved == (1, 2)
    manager.saved([1, 2], 1.0)
    store(manager, 5, 6)
    room = manager.make_room(GPU, 2)
    assert room.demote == (MigrationPlan(GPU, CPU, (6, 5)),)
    assert all("a copy lies on the next tier" in reason for _, _, reason in room.drop)


def test_a_victim_that_goes_takes_what_hangs_below_it_on_cpu():
    manager = manager_of(gpu=4, cpu=4, migration=Chooses(lambda key: key == 3))
    store(manager, 1, 2, 3)
    manager.carry_out(manager.make_room(GPU, 1), 1.0)
    assert manager.books.fast_tier(3) is CPU
    room = manager.make_room(GPU, 1)
    assert victims(room) == [2]
    assert [(tier, key) for tier, key, _ in room.drop] == [(CPU, 3), (GPU, 2)]


def test_no_block_is_kept_below_one_that_goes():
    manager = manager_of(gpu=4, cpu=4, migration=Chooses(lambda key: key != 2))
    store(manager, 1, 2, 3)
    room = manager.make_room(GPU, 3)
    assert [key for _, key, _ in room.drop] == [3, 2] and room.demote == (MigrationPlan(GPU, CPU, (1,)),)


def test_what_finds_no_room_below_goes_leaves_first():
    manager = manager_of(gpu=6, cpu=2)
    store(manager, 1, 2, 3, 4)
    room = manager.make_room(GPU, 4)
    assert [key for _, key, _ in room.drop] == [4, 3] and room.demote == (MigrationPlan(GPU, CPU, (2, 1)),)


def test_held_blocks_of_cpu_make_no_room():
    manager = manager_of(gpu=6, cpu=2)
    store(manager, 1, 2)
    manager.carry_out(manager.make_room(GPU, 2), 1.0)
    assert manager.looked_up(9, [1, 2], 2, 1.0) == 2
    store(manager, 5, 6)
    room = manager.make_room(GPU, 2)
    assert room.demote == () and [key for _, key, _ in room.drop] == [6, 5]


def test_places_that_nobody_can_have_are_no_room():
    manager = manager_of(gpu=6, cpu=4)
    store(manager, 1, 2, 3, 4)
    manager.occupied(CPU, 1, 1.0)
    room = manager.make_room(GPU, 4)
    assert room.demote == (MigrationPlan(GPU, CPU, (3, 2, 1)),)
    manager.carry_out(room, 1.0)
    store(manager, 11, 12)
    assert [(tier, key) for tier, key, _ in manager.make_room(GPU, 1).drop] == [(CPU, 3)]
    manager.occupied(CPU, 0, 2.0)
    assert manager.make_room(GPU, 1).drop == ()


def test_room_for_a_load_is_not_made_of_what_it_continues():
    manager = manager_of(gpu=6, cpu=3, nvme=6)
    store(manager, 1, 2, 3, 4)
    manager.carry_out(manager.make_room(GPU, 4), 1.0)
    manager.adopted(chain(5, 6, parent=4, depth=5), NVME, 1.0)
    store(manager, 21)
    manager.carry_out(manager.make_room(GPU, 1), 1.0)
    on_cpu = [key for key in (1, 2, 3, 4, 21) if manager.books.is_on(key, CPU)]
    assert on_cpu == [1, 2, 21]
    manager.adopted(chain(3, parent=2, depth=3), NVME, 1.0)
    manager.loading([3], 2.0)
    assert manager.num_free(CPU) == -1
    assert victims(manager.make_room(CPU, 2)) == [21], "2 is the older one, and 3 continues it"
    manager.failed([3], "planted", 3.0)
    assert 2 in victims(manager.make_room(CPU, 2))
    manager.books.check()


def test_too_few_victims_are_topped_up():
    manager = manager_of("lazy")
    store(manager, 1, 2, 3)
    assert manager.make_room(GPU, 2).victims == ((3, "least recently used, as the policy chose too few"),
                                                 (2, "least recently used, as the policy chose too few"))  # fmt: skip


@pytest.mark.parametrize(
    ("policy", "why"),
    [
        ("raising", "no idea"),
        ("foreign", "not on tier gpu"),
        ("locked", "held by a request or by a block"),
        ("odd", "answered 17"),
    ],
)
def test_nonsense_of_a_policy_is_its_own_error(policy, why):
    manager = manager_of(policy)
    store(manager, 1, 2, 3, 4, release=False, request=1)
    store(manager, 5)
    with pytest.raises(PolicyError, match=why):
        manager.make_room(GPU, 2)


@pytest.mark.parametrize("keys", [(9,), (1, 2), (2, 2)])
def test_nonsense_of_a_migration_policy_is_its_own_error(keys):
    class Bad(Chooses):
        def plan(self, context):
            return super().plan(context)._replace(plan=MigrationPlan(GPU, CPU, keys))

    manager = manager_of(cpu=4, migration=Bad(lambda key: True))
    store(manager, 2)
    store(manager, 1)
    with pytest.raises(PolicyError, match="chose"):
        manager.make_room(GPU, 2)


def test_a_block_that_comes_twice_and_a_collision():
    manager = manager_of()
    store(manager, 1, 2, 3)
    assert manager.stored(8, chain(1, 2, 3), 2.0) == ()
    assert manager.books.num_blocks(GPU) == 3 and manager.books.num_pins(3, GPU) == 1
    assert manager.stored(9, chain(3, 4, parent=77, depth=2), 2.0) == (3, 4), (
        "another block of this key, and what follows"
    )
    assert manager.stored(9, chain(6, 6), 2.0) == (6,)
    assert manager.counts["collisions"] == 2 and 4 not in manager.books
    manager.books.check()


def test_stored_again_while_on_cpu():
    manager = manager_of(cpu=4)
    store(manager, 1, 2)
    manager.carry_out(manager.make_room(GPU, 2), 1.0)
    manager.stored(5, chain(1, 2), 2.0)
    assert manager.books.num_blocks(CPU) == 0 and manager.books.held(5) == [1, 2]


def test_loads_keep_room_and_the_file():
    manager = manager_of(gpu=4, cpu=3, nvme=4)
    store(manager, 1, 2, 3)
    manager.saving([1, 2, 3], 1.0)
    manager.saved([1, 2, 3], 1.0)
    manager.dropped(GPU, [3, 2, 1], 1.0)
    fetch = manager.fetch(7, [1, 2, 3, 4], 0, 2.0)
    assert fetch.keys == (1, 2, 3) and set(fetch.tiers) == {NVME}
    manager.loading(fetch.keys, 2.0)
    assert manager.num_free(CPU) == 0 and manager.make_room(NVME, 3).victims == ()
    assert manager.fetch(8, [1, 2], 0, 2.0).keys == (), "on their way already"
    manager.failed([2], "corrupt", 3.0)
    manager.loaded([1, 3], 3.0)
    assert manager.num_free(CPU) == 1 and manager.books.num_resident([1, 2, 3]) == 1
    assert manager.counts["failed_loads"] == 1
    manager.loaded([1, 3], 3.0)
    manager.books.check()


def test_a_load_that_the_policy_refuses():
    manager = manager_of(gpu=4, cpu=3, nvme=4, migration=Chooses(lambda key: key < 2))
    store(manager, 1, 2)
    for key in (1, 2):
        manager.saving([key], 1.0)
        manager.saved([key], 1.0)
    manager.dropped(GPU, [2, 1], 1.0)
    fetch = manager.fetch(7, [1, 2], 0, 2.0)
    assert fetch.keys == (1,) and fetch.net_benefit_s == 1.0 and fetch.reason == "as told"
    assert manager.counts["loads_avoided"] == 1


def test_a_save_whose_block_has_left_meanwhile():
    manager = manager_of(gpu=4, cpu=0, nvme=2)
    store(manager, 1)
    manager.saving([1, 99], 1.0)
    manager.dropped(GPU, [1], 1.0)
    assert manager.is_arriving(1) and 1 not in manager.books and manager.num_free(NVME) == 1
    manager.saved([1], 2.0)
    assert manager.books.is_on(1, NVME)


def test_quotas_go_first():
    quota = QuotaManager({"a": {"gpu": 2}}, {GPU: 8})
    manager = manager_of(quota=quota)
    store(manager, 1, 2, tenant="b")
    store(manager, 5, 6, 7, tenant="a")
    room = manager.make_room(GPU, 2)
    assert room.victims[0] == (7, "tenant a has more than its 2 blocks") and victims(room) == [7, 2]
    store(manager, 15, 16, tenant="a")
    assert victims(manager.make_room(GPU, 1)) == [7, 6, 5], "all that is above the quota, beyond what was asked"


def test_quotas_of_the_tier_below():
    quota = QuotaManager({"a": {"cpu": 1}}, {GPU: 8, CPU: 6})
    manager = manager_of(cpu=6, quota=quota)
    store(manager, 1, 2, 3, tenant="a")
    room = manager.make_room(GPU, 3)
    assert room.demote == (MigrationPlan(GPU, CPU, (1,)),) and [key for _, key, _ in room.drop] == [3, 2]
    manager.carry_out(room, 1.0)
    store(manager, 11, tenant="a")
    room = manager.make_room(GPU, 1)
    assert [(tier, key) for tier, key, _ in room.drop] == [(CPU, 1)], "its own block makes way"
    assert room.demote == (MigrationPlan(GPU, CPU, (11,)),)


def test_corrections_from_the_engine():
    manager = manager_of()
    store(manager, 1, 2)
    manager.corrected([2], [], 1.0)
    assert manager.make_room(GPU, 2).victims == ()
    manager.corrected([], [2], 1.0)
    assert victims(manager.make_room(GPU, 2)) == [2, 1]
    manager.books.check()


def test_moves_that_failed_leave_the_books_alone():
    manager = manager_of(cpu=2)
    store(manager, 1)
    plan = MigrationPlan(GPU, CPU, (1,))
    manager.moved(plan, MigrationResult((), {1: "broken"}), 1.0)
    manager.moved(plan, MigrationResult((77,), {}), 1.0)
    assert manager.books.fast_tier(1) is GPU
    assert manager.report()["events"]["refused_gpu_cpu"] == 1


def test_a_refused_move_is_carried_out_as_a_drop():
    manager = manager_of(cpu=4, fault=lambda call, key: "broken" if key == 2 else None)
    store(manager, 1, 2, 3)
    manager.carry_out(manager.make_room(GPU, 3), 1.0)
    assert [key for key in (1, 2, 3) if key in manager.books] == [1], "nothing hangs below a block that is gone"


@pytest.mark.parametrize(
    ("tiers", "why"),
    [
        ([TierSpec(CPU, 3)], "give gpu"),
        ([TierSpec(CPU, 3), TierSpec(GPU, 3)], "give gpu, then cpu"),
        ([TierSpec(GPU, 3), TierSpec(GPU, 3)], "each once"),
        ([TierSpec(GPU, 0)], "0 blocks"),
    ],
)
def test_bad_tiers_are_refused(tiers, why):
    with pytest.raises(PolicyError, match=why):
        HierarchyManager(tiers, make_policy=make_policy)


@pytest.mark.parametrize("policy", ["lru", "fifo", "newest", "lazy"])
@pytest.mark.parametrize("tiers", [(0, 0), (6, 0), (0, 10), (6, 10)])
@pytest.mark.parametrize("even", [False, True])
def test_books_backend_and_quotas_stay_one(policy, tiers, even):
    cpu, nvme = tiers
    for seed in range(3):
        quota = QuotaManager({"a": {"gpu": 3} | ({"cpu": 0.4} if cpu else {})}, {GPU: 7, CPU: cpu}) if seed else None
        manager = manager_of(policy, 7, cpu, nvme, migration=KeepsEven() if even else None, quota=quota)
        engine = Engine(manager, 1 + seed)
        for request in requests(seed, 40):
            engine.serve(*request)
            engine.check()
        assert engine.num_hits > 10
