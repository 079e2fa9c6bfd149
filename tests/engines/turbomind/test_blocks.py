"""Victims, notices and the record: a whole adapter behind the native table, on ranks that are played."""

import json

import pytest

from benchmarks.processes import wait_until
from sagellm.core.errors import ConfigError, PluginError
from sagellm.core.hooks import BlockState, CommOp, EvictionReason, Phase
from tests.engines.turbomind import abi
from tests.engines.turbomind.conftest import plugin_of
from tests.engines.turbomind.played import PlayedRank, play

SHARED = list(range(100, 108))  # two blocks
A, B = [*SHARED, 1, 2, 3, 4, 5], [*SHARED, 11, 12, 13, 14]
C = list(range(500, 520))  # five blocks


def test_the_native_index_works_without_plugins(start):
    hooks = start()
    assert hooks.port.topics == ()
    rank = PlayedRank(hooks.table)
    assert [rank.request(1, A), rank.request(2, B), rank.request(3, A)] == [0, 2, 3]
    report = hooks.report()
    assert report["prefix"]["hit_tokens"] == 20 and report["table"]["stored_blocks"] == 4
    assert report["port"]["asked"] == 0 and report["enabled"] == {}
    rank.request(4, C)
    rank.request(5, [seed + 50 for seed in C])
    assert hooks.report()["evicted"]["prefix"] == sum(map(len, rank.victims)) > 0, "counted although nobody listens"
    assert rank.unique_id[rank.state.index(abi.CACHED)] > 0 and rank.last_unique_id > 2**31


def test_a_plugin_chooses_among_trees(start):
    hooks = start("MostRecentFirst")
    rank = PlayedRank(hooks.table, num_blocks=8)
    for seq_id, prompt in enumerate((A, B, C)):
        rank.request(seq_id, prompt)  # C needs one block more than are free
    (request,) = plugin_of(hooks).requests
    assert request.count == 1 and request.on_device.all() and not request.block_ids.flags.writeable
    rows = {int(block): row for row, block in enumerate(request.block_ids)}
    depths = sorted(request.depth.tolist())
    assert depths == [4, 8, 12, 12]
    root = int(request.block_ids[request.depth.tolist().index(4)])
    inner = int(request.block_ids[request.depth.tolist().index(8)])
    assert request.parent_ids[rows[root]] == -1 and request.parent_ids[rows[inner]] == root
    leaves = [block for block, row in rows.items() if request.depth[row] == 12]
    assert all(request.parent_ids[rows[leaf]] == inner for leaf in leaves)
    newest = max(leaves, key=lambda leaf: request.last_access[rows[leaf]])
    assert rank.victims == [[newest]]
    assert [rank.request(3, A), rank.request(4, B)] == [3, 2], "the plug-in's choice decided which prefix is left"


def test_what_a_plugin_may_ask(start):
    hooks = start("MostRecentFirst")
    play(hooks.table, [A, B, C], num_ranks=1, num_blocks=8)
    plugin = plugin_of(hooks)
    (counts,), (infos,), (request,) = plugin.counts, plugin.infos, plugin.requests
    assert counts == (8, 4, 4, 0, 0, 0)
    assert [info.block_id for info in infos] == request.block_ids.tolist()
    assert {(info.state, info.size_bytes) for info in infos} == {(BlockState.CACHED, 4096)}
    assert [info.last_access for info in infos] == request.last_access.tolist()
    assert plugin.engine.block_size == 4 and plugin.engine.block_bytes == 4096
    with pytest.raises(PluginError, match="inside select_victims"):
        plugin.engine.block_counts()
    with pytest.raises(PluginError, match="inside a hook only"):
        plugin.engine.register_eviction_callback(print)


def test_four_ranks_stay_one_whatever_decides(start):
    hooks = start("Random")
    prompts = [[(seed % 7) * 100 + place for place in range(4 + seed % 13)] for seed in range(120)]
    ranks = play(hooks.table, prompts, num_ranks=4)
    assert len({str((rank.num_matched, rank.victims, rank.unique_id)) for rank in ranks}) == 1
    stats = hooks.table.stats()
    assert stats["divergences"] == 0 and stats["replays"] == 3 * stats["decisions"]
    assert hooks.port.stats()["asked"] == len(ranks[0].victims) > 10
    assert hooks._host.faults == []


def test_notices(start):
    hooks = start("Listener")
    rank = PlayedRank(hooks.table, num_blocks=8)
    for seq_id, prompt in enumerate((A, B, C), start=1):
        rank.request(seq_id, prompt)
    rank.collective(1, 2048, 0.5)
    rank.collective(4, 64, -1.0)
    told = plugin_of(hooks)
    wait_until("every notice", lambda: len(told.comms) == 2 and len(told.steps) == 3 and told.by_callback)
    assert [(m.request_id, m.num_tokens, m.num_matched) for m in told.matched] == [(1, 13, 0), (2, 12, 8), (3, 20, 0)]
    assert len(told.matched[1].block_ids) == 2 and told.matched[1].source == "native index"
    stored = [(u.request_id, u.first_token, u.token_ids.tolist(), len(u.block_ids)) for u in told.stored]
    assert stored == [(1, 0, A[:12], 3), (2, 8, B[8:12], 1), (3, 0, C, 5)]
    (notice,) = told.evicted
    assert notice.reason is EvictionReason.PREFIX and len(notice.block_ids) == 1 and told.by_callback == [notice]
    assert [(s.step, s.num_tokens) for s in told.steps] == [(1, 13), (2, 12), (3, 20)]
    assert {s.phase for s in told.steps} == {Phase.PREFILL}
    assert told.comms == [
        CommOp("all_reduce", 2048, "", 0, 2, True, 0.0005),
        CommOp("all_reduce_rmsnorm", 64, "", 0, 2, True, None),
    ]
    (row,) = hooks.report()["comm"]
    assert (row["rank"], row["op"], row["count"], row["exposed_ns"]) == (0, "all_reduce", 1, 500_000)
    assert hooks.report()["evicted"]["prefix"] == 1


def test_misses_of_a_waiting_request_are_told_once(start):
    hooks = start("Listener")
    rank = PlayedRank(hooks.table)
    for _ in range(5):
        rank._lookup(1, A)
    rank.request(2, A)
    rank._lookup(1, A)
    told = plugin_of(hooks)
    wait_until("the hit", lambda: len(told.matched) >= 3)
    assert [(m.request_id, m.num_matched) for m in told.matched] == [(1, 0), (2, 0), (1, 12)]


def test_the_record(start, tmp_path):
    file = tmp_path / "record.jsonl"
    hooks = start("MostRecentFirst", record=file)
    play(hooks.table, [A, B, C, A], num_ranks=2, num_blocks=8)
    hooks.close()
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["n"] for line in lines] == list(range(len(lines)))
    evictions = [line for line in lines if line["event"] == "evict"]
    assert evictions[0]["policy"].endswith(":MostRecentFirst") and evictions[0]["reason"] == "most recent first"
    assert evictions[0]["requested"] == 1 and evictions[0]["candidates"] == 4
    assert {"open", "lookup", "store", "evict", "close"} == {line["event"] for line in lines}
    assert (lines[0]["event"], lines[0]["engine"]) == ("open", "lmdeploy.turbomind")
    assert [line["matched"] for line in lines if line["event"] == "lookup"][:3] == [0, 8, 0], "once a group, not a rank"


def test_what_a_plugin_leaves_open_is_the_index_s_choice_in_the_record(start, tmp_path):
    file = tmp_path / "record.jsonl"
    hooks = start(("Answers", {"victims": []}), record=file)
    play(hooks.table, [A, B, C], num_ranks=1, num_blocks=8)
    hooks.close()
    (eviction,) = [line for line in map(json.loads, file.read_text().splitlines()) if line["event"] == "evict"]
    assert eviction["policy"] == "native index" and "least recently used" in eviction["reason"]
    assert len(eviction["victims"]) == 1


def test_what_the_index_chooses_is_told_with_its_own_order(start, tmp_path):
    file = tmp_path / "record.jsonl"
    hooks = start(record=file)
    play(hooks.table, [A, B, C], num_ranks=1, num_blocks=8)
    hooks.close()
    (eviction,) = [line for line in map(json.loads, file.read_text().splitlines()) if line["event"] == "evict"]
    assert eviction["policy"] == "native index"
    assert eviction["reason"] == "remains of ended requests first, then least recently used"


def test_without_prefix_caching_nothing_is_told_as_evicted(start, tmp_path):
    """The engine tells of every block of a request that ends."""
    file = tmp_path / "record.jsonl"
    hooks = start("Listener", prefix_caching=False, record=file)
    assert "evicted" not in hooks.port.topics and "step_end" in hooks.port.topics
    rank = PlayedRank(hooks.table, num_blocks=8)
    for seq_id, prompt in enumerate((A, B, C), start=1):
        rank.request(seq_id, prompt)
    told = plugin_of(hooks)
    wait_until("the last step", lambda: len(told.steps) == 3)
    assert rank.victims and told.evicted == told.by_callback == []
    assert hooks.table.stats()["evicted_blocks"] > 0 and hooks.report()["evicted"]["prefix"] == 0
    hooks.close()
    assert '"evict"' not in file.read_text()


@pytest.mark.parametrize(
    ("plugin", "words"),
    [("LooksUp", "native index"), ("WaitsForTheEnd", "when a request has ended"), ("DecidesComm", "communicator"),
     ("BeginsComm", "use comm_end")],
)
def test_what_turbomind_cannot_do_is_refused(start, plugin, words):
    with pytest.raises(ConfigError, match=rf"{plugin} has \w+: .*{words}.*--engine pytorch"):
        start(plugin)


def test_a_new_generation_of_the_cache_begins_with_nothing(start):
    hooks = start("MostRecentFirst")
    rank = PlayedRank(hooks.table, num_blocks=8)
    rank.request(1, A)
    rank._call("reset", rank._here)
    again = PlayedRank(hooks.table, num_blocks=8)
    again.manager.generation = 2
    assert [again.request(1, A), again.request(2, A)] == [0, 3], "the old generation's blocks are gone"
    again.request(3, C)
    again.request(4, B)
    assert sorted(plugin_of(hooks).requests[-1].depth.tolist()) == [4, 8, 12, 12, 16, 20], "C, and what A alone has"
