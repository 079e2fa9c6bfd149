"""The prefix cache under LMDeploy's whole scheduler, on a device that notices every read of what is not one's own."""

import json
import random
from collections import Counter

import numpy as np
import pytest

from sagellm.engines.lmdeploy.scheduler import PREFIX_INDEX
from sagellm.prefix_reuse import ReferenceIndexedPool, prefix_hashes
from tests.engines.lmdeploy.simulated import BLOCK, VOCABULARY, SimulatedEngine, identities
from tests.plugins import plugin_of
from tests.pool import check_blocks
from tests.sweeps import slow_but

LISTENER = "tests.plugins:Listener"
PLUGINS = {
    "none": (),
    "most recent first": ("tests.plugins:MostRecentFirst",),
    "offload": ("tests.plugins:OffloadInstead",),
    "own index": ("tests.plugins:OwnIndex",),
    "moves anything": ("tests.plugins:MovesAnything",),
}


def expected(tokens, num_new, adapter=None):
    """Return the tokens that a device without any cache would generate."""
    tokens = list(tokens)
    for _ in range(num_new):
        tokens.append(identities(adapter, tokens)[-1] % VOCABULARY)
    return tokens[len(tokens) - num_new :]


class Clients:
    """Random arrivals, cancellations, ends in the middle and second turns. Prompts share prefixes."""

    def __init__(self, engine, seed):
        self.engine = engine
        self.draw = random.Random(seed)
        self.texts = [[self.draw.randrange(VOCABULARY) for _ in range(30)] for _ in range(3)]
        self.open = []
        self.done = self.stopped = 0
        self.left = 60

    def prompt(self, most=24):
        return self.draw.choice(self.texts)[: self.draw.randrange(1, most)]

    def act(self):
        """Called in the middle of steps."""
        check_blocks(self.engine.scheduler)
        for session in list(self.open):
            self.look_after(session)
        if self.draw.random() < 0.5 and self.left and len(self.open) < 6:
            self.left -= 1
            adapter = self.draw.choice((None, None, "a"))
            self.open.append(self.engine.add(self.prompt(), self.draw.randrange(1, 9), adapter))
        check_blocks(self.engine.scheduler)

    def look_after(self, session):
        seq, chance = self.engine.seq(session), self.draw.random()
        if seq.status.name == "STOPPED":
            if seq.num_new_tokens == seq.sampling_param.max_new_tokens:
                self.check_answer(seq)
            if chance < 0.2 and seq.num_valid_ids < 30:
                self.engine.go_on(session, self.prompt(8))
            elif chance < 0.7:
                self.end(session)
        elif seq.status.name == "ABORTED" or chance < 0.01:
            self.end(session)
        elif chance < 0.04:
            self.engine.stop(session)
            self.stopped += 1

    def check_answer(self, seq):
        known = seq.num_valid_ids - seq.num_new_tokens
        assert seq.generated_ids.tolist() == expected(seq.all_ids[:known].tolist(), seq.num_new_tokens, seq.adapter_name)
        self.done += 1

    def end(self, session):
        self.engine.end(session)
        self.open.remove(session)

    def finish(self):
        while self.left or self.open:
            self.engine.events = self.act
            if not self.engine.step():
                self.act()


@pytest.mark.parametrize("decode_round", slow_but([1, 3], 3))
@pytest.mark.parametrize("plugin", slow_but(PLUGINS, "none", "moves anything"))
def test_nobody_ever_reads_what_is_not_its_own(plugin, decode_round):
    totals = Counter()
    for seed in range(8):
        host = 6 if plugin in ("offload", "moves anything") else 0
        engine = SimulatedEngine(*PLUGINS[plugin], pool=14, host=host, decode_round=decode_round)
        clients = Clients(engine, seed)
        clients.finish()
        check_blocks(engine.scheduler)
        report = engine.hooks.report()
        engine.hooks.close()
        assert report["faults"] == []
        assert report["blocks"]["free"] + report["blocks"]["cached"] == 14
        totals.update(hits=report["prefix"]["hit_tokens"], retries=report["prefix_retries"]["hit_tokens"])
        totals.update(evicted=report["evicted"]["prefix"], recomputed=report["evicted"]["recompute"])
        totals.update(preempted=report["preempted"], stopped=clients.stopped, done=clients.done)
        totals.update(cached=report["blocks"]["cached"])
        if host:
            totals.update(out=report["migrated"]["cpu"], back=report["migrated"]["gpu"])
    assert all(totals.values()), f"the workload proves nothing: {totals}"


@pytest.fixture
def simulate():
    """Builds simulated engines; afterwards, with every session ended, all blocks are free or cached."""
    engines = []

    def start(*plugins, **options):
        engines.append(SimulatedEngine(*plugins, **options))
        return engines[-1]

    yield start
    for engine in engines:
        for session in list(engine.scheduler.sessions):
            engine.end(session)
        check_blocks(engine.scheduler)
        assert engine.hooks.kv.counts().active == 0
        engine.hooks.close()


def tokens_of(length, seed=0):
    return random.Random(seed).choices(range(10, 99), k=length)


def num_cached(engine, tokens, adapter=""):
    return len(engine.hooks.cache.path(np.array(tokens), adapter))


def test_a_request_of_one_token_fills_the_cache(simulate):
    engine, prompt = simulate(), tokens_of(9)
    engine.run(prompt, num_new=1)
    assert num_cached(engine, prompt) == engine.hooks.kv.counts().cached == 2
    engine.run(prompt, num_new=1)
    assert engine.hooks.report()["prefix"]["hit_tokens"] == 8


@pytest.mark.parametrize("how", ["stop", "end"])
@pytest.mark.parametrize("num_loops_done", [0, 1, 3])
def test_cancelled_while_a_step_is_on_its_way(simulate, how, num_loops_done):
    """The blocks that were computed by then are cached, and no others."""
    engine, prompt = simulate(), tokens_of(11)
    session = engine.add(prompt, num_new=20)
    seq = engine.seq(session)
    for _ in range(num_loops_done):
        engine.step()
    tokens = seq.all_ids.tolist()
    engine.events = lambda: session in engine.scheduler.sessions and getattr(engine, how)(session)
    engine.until_idle()
    check_blocks(engine.scheduler)
    num_computed = 0 if num_loops_done == 0 else len(prompt) + num_loops_done - 1
    assert num_cached(engine, tokens) == num_computed // BLOCK == np.count_nonzero(engine.hooks.cache.is_cached)


def test_what_was_in_use_until_now_is_recent(simulate):
    """The oldest request ends last: what it leaves outlives what younger ones left."""
    engine, old, young, third = simulate(pool=7), tokens_of(9, 1), tokens_of(9, 2), tokens_of(17, 3)
    session = engine.add(old, num_new=3)
    engine.step()
    engine.stop(session)
    engine.run(young, num_new=1)
    engine.end(session)
    engine.run(third, num_new=1)
    assert (num_cached(engine, old), num_cached(engine, young), num_cached(engine, third)) == (2, 0, 4)
    assert engine.hooks.report()["evicted"]["prefix"] == 2


def test_twins_in_one_step_share_their_blocks_afterwards(simulate):
    engine, prompt = simulate(LISTENER), tokens_of(10)
    sessions = [engine.add(prompt, num_new=9) for _ in range(3)]
    engine.step()
    check_blocks(engine.scheduler)
    tables = [engine.seq(session).logical_blocks[:2].tolist() for session in sessions]
    assert tables[0] == tables[1] == tables[2]
    assert engine.scheduler.block_manager.allocator.get_ref_count(np.array(tables[0])).tolist() == [4, 4]
    engine.hooks._host.flush()
    assert [update.block_ids for update in plugin_of(engine).stored] == [tuple(tables[0])] * 3


def test_adapters_share_nothing(simulate):
    engine, prompt = simulate(), tokens_of(9)
    for adapter, hit in ((None, 0), ("a", 0), ("b", 0), ("a", 8), (None, 8)):
        before = engine.hooks.report()["prefix"]["hit_tokens"]
        assert engine.run(prompt, 4, adapter) == expected(prompt, 4, adapter)
        assert engine.hooks.report()["prefix"]["hit_tokens"] - before == hit
    assert sorted(engine.hooks.cache.index.namespaces()) == ["", "a", "b"]


@pytest.mark.parametrize("kind", ["embeddings", "multimodals"])
def test_nothing_after_an_image_is_shared(simulate, kind):
    """Its tokens are placeholders, the same for all images."""
    from lmdeploy.pytorch.messages import InputEmbeddings
    from lmdeploy.pytorch.multimodal.data_type import MultiModalTensor

    engine, prompt = simulate(), tokens_of(14)
    for _ in range(2):
        if kind == "embeddings":
            image = {"input_embeddings": [InputEmbeddings(np.zeros((3, 1)), 6, 9)]}
        else:
            image = {"multimodals": {"image": [MultiModalTensor(None, 6, 9)]}}
        session = engine.add(prompt, 4, **image)
        engine.until_idle()
        engine.end(session)
    assert num_cached(engine, prompt) == engine.hooks.kv.counts().cached == 1
    assert engine.hooks.report()["prefix"]["hit_tokens"] == 4


def test_a_waiting_request_gains_what_was_published_meanwhile(simulate):
    engine, prompt = simulate(LISTENER), tokens_of(13)
    engine.run(prompt[:5], num_new=1)
    waiting = engine.seq(engine.add(prompt))
    engine.hooks.lookup_prefix(None, waiting)
    assert (waiting.num_blocks, waiting.num_history_ids) == (1, 4)
    waiting.status = type(waiting.status).STOPPED  # out of the way of the next one
    engine.run(prompt, num_new=1)
    engine.hooks.lookup_prefix(None, waiting)
    assert (waiting.num_blocks, waiting.num_history_ids) == (3, 12)
    check_blocks(engine.scheduler)
    engine.hooks._host.flush()
    gained = [len(match.block_ids) for match in plugin_of(engine).matched if match.request_id == waiting.session_id]
    assert gained == [1, 2]


def test_a_request_whose_blocks_came_from_another_engine(simulate):
    """LMDeploy's migration loop looks nothing up, and hands over a list."""
    from lmdeploy.pytorch.messages import UpdateTokenMode

    engine, prompt = simulate(), tokens_of(9)
    session = engine.add(prompt)
    seq = engine.seq(session)
    engine.scheduler.block_trie.match([seq])
    assert seq.num_blocks == 0
    engine.scheduler.block_manager.allocate(seq)
    seq.update_token_ids(np.array([5]), mode=UpdateTokenMode.PREFILL)
    engine.hooks.step_end([seq], True)
    assert num_cached(engine, prompt) == 2
    check_blocks(engine.scheduler)


def test_evictions_name_the_policy_and_the_blocks(simulate, tmp_path):
    record = tmp_path / "events.jsonl"
    engine = simulate(pool=6, record=record)
    for seed in range(3):
        engine.run(tokens_of(13, seed), num_new=1)
    engine.hooks.close()
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    first, second = [line for line in lines if line["event"] == "evict"]
    assert (first["policy"], first["reason"], first["requested"], first["candidates"]) == ("lru", "least recently used", 1, 3)
    stored = [line["blocks"] for line in lines if line["event"] == "store"]
    assert first["victims"] == stored[0][:1:-1] and second["requested"] == 3
    lookups = [line for line in lines if line["event"] == "lookup"]
    hashes = [prefix_hashes(tokens_of(13, seed), BLOCK) for seed in range(3)]
    assert [[int(text, 16) for text in line["hashes"]] for line in lookups] == [each.tolist() for each in hashes]


@pytest.mark.parametrize("plugin", ["none", "most recent first"])
def test_the_same_with_the_plain_pool(plugin):
    """Which blocks every request got, and in which order the free ones lie."""
    for seed in range(4):
        ends = []
        for is_plain in (False, True):
            engine = SimulatedEngine(*PLUGINS[plugin], pool=14)
            cache, allocator = engine.hooks.cache, engine.scheduler.block_manager.allocator
            if is_plain:
                cache._blocks = cache._tie(ReferenceIndexedPool)
            Clients(engine, seed).finish()
            engine.hooks.close()
            assert engine.hooks.report()["faults"] == []
            memory, lists = allocator._log_mem, (allocator._free_blocks, cache._pool._free_blocks)
            ends.append([array.tolist() for array in (memory.phy_map, memory.ref_count, memory.access_time, *lists)])
        assert ends[0] == ends[1]


def test_freeing_as_the_allocator_does():
    """The results are the same, block for block. This includes calls that the allocator accepts and the pool refuses."""
    engines = [SimulatedEngine(pool=20) for _ in range(2)]
    ours, theirs = (engine.scheduler.block_manager.allocator for engine in engines)
    for allocator, free in ((ours, ours.free), (theirs, lambda ids: type(theirs).free(theirs, ids))):
        first, second = allocator.allocate(5), allocator.allocate(3)
        allocator.add_ref_count(first[:2], 1)
        for ids in (first[::-2], second, np.empty(0, np.int64), first[:3], first[3:4], first[2:3]):
            free(ids)  # first[2] is free by then
        allocator._log_mem.ref_count[first[2]] = 0
        free(first[:2])
    assert ours._free_count == theirs._free_count == ours.get_phy_allocator("gpu")._free_count
    for name in ("ref_count", "phy_map"):
        assert getattr(ours._log_mem, name).tolist() == getattr(theirs._log_mem, name).tolist()
    assert ours._free_blocks.tolist() == theirs._free_blocks.tolist()
    for engine in engines:
        engine.hooks.close()


class _Failing:
    """An index, or a pool tied to one, that raises in one of its calls, from a given time on."""

    def __init__(self, inner, call, after):
        self._inner, self._call, self._left = inner, call, after

    def __getattr__(self, name):
        method = getattr(self._inner, name)
        if name != self._call:
            return method

        def counted(*args, **options):
            self._left -= 1
            if self._left < 0:
                raise MemoryError("planted")
            return method(*args, **options)

        return counted


HOOK_OF = {  # whose failure it is: each call of the index, and each of the pool
    "lookup": "lookup", "extend": "extend", "unlock": "unlock", "evict_lru": "evict", "move": "lookup",
    "pool.match": "lookup", "pool.publish": "extend", "pool.evict_lru": "evict", "pool.drop_lru": "evict",
    "pool.give_back": "evict", "pool.leave": "unlock",
}  # fmt: skip


@pytest.mark.parametrize("call", HOOK_OF)
def test_an_index_that_fails_costs_no_request(call):
    """The engine goes on without one, and says so."""
    method = call.removeprefix("pool.")
    for seed, after in enumerate((0, 1, 5, 20)):
        plugin = {"move": ("tests.plugins:OffloadInstead",), "pool.give_back": (LISTENER,)}.get(call, ())
        host = 0 if call in ("pool.drop_lru", "pool.give_back", "pool.leave") else 6
        engine = SimulatedEngine(*plugin, pool=14, host=host)
        cache, clients = engine.hooks.cache, Clients(engine, seed)
        if method != call:
            cache._blocks = _Failing(cache._blocks, method, after)
        else:
            cache.index = _Failing(cache.index, call, after)
            cache._blocks = cache._tie(ReferenceIndexedPool)
        clients.finish()
        check_blocks(engine.scheduler)
        report = engine.hooks.report()
        engine.hooks.close()
        assert clients.done > 10
        if call == "move" and plugin[0] in {name for name, *_ in report["faults"]}:
            continue  # it failed in the hands of the plug-in
        ((name, hook, kind, number),) = report["faults"]
        assert (name, kind, number) == (PREFIX_INDEX, "raised", 1)
        assert hook == HOOK_OF[call] or call == "unlock"
        assert report["blocks"]["free"] == 14 and report["blocks"]["host_used"] == 0
        assert report["prefix_index"] == {}
