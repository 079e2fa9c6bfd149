"""The tiers in the real engine: exact answers under pressure, and a record that replays without a difference."""

from errno import ENOSPC

import pytest

from sagellm.core.config import KVConfig
from sagellm.replay.verify import verify_log
from tests.engines.lmdeploy.test_exactness import CROWD, NUM_NEW, answers
from tests.plugins import plugin_of


def serve(engine, reference, rounds=2):
    expected = reference(CROWD, NUM_NEW)
    for _ in range(rounds):
        assert answers(engine, CROWD) == expected
    report = engine.hooks.report()
    assert report["faults"] == [], engine.hooks._host.faults
    assert report["preempted"] > 0
    return plugin_of(engine)


@pytest.mark.parametrize(("policy", "host"), [("lru", 0), ("s3fifo", 24), ("prefix_reuse", 24)])
def test_under_pressure_and_replayed(start_engine, reference, tmp_path, policy, host):
    log = tmp_path / "log.jsonl"
    kv = KVConfig(policy=policy, migration="always") if host else KVConfig(policy=policy)
    engine = start_engine(kv_blocks=30, host_kv_blocks=host, kv=kv, record=log)
    plugin = serve(engine, reference)
    assert plugin._counts["lookups_disagreed"] == plugin._counts["resynchronised"] == 0
    events = plugin.report()["events"]
    assert bool(events.get("moved_gpu_cpu")) == bool(host) and events["blocks_found"] > 0
    engine.close()
    report = verify_log(log)
    assert (
        report.agrees
        and report.num_hits == events["blocks_found"]
        and report.num_decisions > 5
        and report.num_victims > 10
    )


def test_with_files_below(start_engine, reference, tmp_path):
    log = tmp_path / "log.jsonl"
    kv = KVConfig(migration="always", disk=tmp_path / "kv", disk_gib=0.01, deadline_s=30.0)
    engine = start_engine(kv_blocks=30, host_kv_blocks=16, kv=kv, record=log)
    plugin = serve(engine, reference, rounds=3)
    events = plugin.report()["events"]
    assert events["saved"] > 0 and events["loaded"] > 0, plugin.report()
    assert plugin._counts["lookups_disagreed"] == 0
    engine.close()
    assert verify_log(log).agrees


def test_with_files_that_are_damaged_and_a_disk_that_fills(start_engine, reference, tmp_path, monkeypatch):
    kv = KVConfig(migration="always", disk=tmp_path / "kv", disk_gib=0.01, deadline_s=30.0)
    engine = start_engine(kv_blocks=30, host_kv_blocks=16, kv=kv)
    plugin = serve(engine, reference, rounds=1)
    for file in (tmp_path / "kv").glob("*.kv"):
        content = bytearray(file.read_bytes())
        content[-5] ^= 255
        file.write_bytes(content)
    serve(engine, reference, rounds=1)

    def full(*args):
        raise OSError(ENOSPC, "No space left on device")

    monkeypatch.setattr(plugin._link.store, "_write", full)
    serve(engine, reference, rounds=1)
    assert plugin.report()["disk"]["dropped corrupt"] > 0 and plugin._counts["saves_paused"] > 0, plugin.report()
