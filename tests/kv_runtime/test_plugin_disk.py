"""`TieredKVWithDisk` and its folder: what is needed at the start, what an earlier run has left, a folder that opens late."""

import threading

import pytest

from sagellm.core.errors import PluginError, TierError
from sagellm.core.hooks import Tier
from sagellm.kv_runtime import tiered_kv_disk
from sagellm.kv_runtime.disk_store import DiskStore
from sagellm.kv_runtime.opening import Opening
from sagellm.kv_runtime.plugin import TieredKVWithDisk
from tests.kv_runtime.disk_engine import FIRST, OTHERS, admit, opened, push_out
from tests.kv_runtime.fake_engine import FakeEngine, plugin_with
from tests.kv_runtime.policies import make_policy


def test_a_restart_knows_what_was_written(start):
    engine = start()
    push_out(engine)
    engine.plugin.close()
    kept = engine.plugin._books.num_blocks(Tier.NVME)
    again = start()
    assert again.plugin._books.num_blocks(Tier.NVME) == kept > 0
    assert admit(again, 1, FIRST) == 1
    again.serve(1, FIRST)
    assert again.num_matched >= 1
    again.check()


def test_another_layout_is_another_world(start):
    engine = start()
    push_out(engine)
    engine.plugin.close()
    plugin = plugin_with(
        TieredKVWithDisk, make_policy, lambda name: None, disk=engine.plugin._config.disk, disk_gib=1e-3
    )
    other = opened(FakeEngine(plugin, 4, 4, layout="another model"))
    assert plugin._books.num_blocks(Tier.NVME) == 0 and other.admitted(1, FIRST)
    plugin.close()


def test_what_is_needed_at_the_start(start, tmp_path):
    with pytest.raises(PluginError, match="needs a host tier"):
        start(host=0)
    with pytest.raises(PluginError, match="needs `disk`"):
        plugin_with(TieredKVWithDisk, make_policy, lambda name: None)
    with pytest.raises(TierError):
        start(disk_gib=1e-9)
    start()
    with pytest.raises(TierError, match="in use"):
        start()
    with pytest.raises(TierError, match="in use"):
        start(wait=False).serve(1, FIRST)


def test_a_folder_that_takes_long_to_open_stands_in_nobodys_way(start, monkeypatch):
    engine = start()
    push_out(engine)
    engine.plugin.close()
    kept = engine.plugin._books.num_blocks(Tier.NVME)
    gate, blocks_of = threading.Event(), DiskStore._open

    def slow(store, drop_other):
        gate.wait(60)
        blocks_of(store, drop_other)

    monkeypatch.setattr(DiskStore, "_open", slow)
    monkeypatch.setattr(tiered_kv_disk, "OPEN_WAIT_S", 0.0)
    monkeypatch.setattr(tiered_kv_disk, "ADOPTED_AT_ONCE", 1)
    late = start(wait=False)
    for request, tokens in enumerate([FIRST, *OTHERS]):
        assert late.admitted(request, tokens) and late.serve(request, tokens)
    assert late.plugin._link is None and late.plugin._counts["saves_paused"] > 0
    assert "disk" not in late.plugin.report()
    gate.set()
    opened(late)
    assert late.plugin._books.num_blocks(Tier.NVME) == kept
    push_out(late)
    late.check()


def test_a_folder_that_nobody_waits_for_is_closed_once_it_is_open():
    gate, closed = threading.Event(), threading.Event()

    class Store:
        close = closed.set

    opening = Opening(lambda: gate.wait(60) and Store)
    assert opening.result() is None
    opening.abandon()
    gate.set()
    assert closed.wait(60)
