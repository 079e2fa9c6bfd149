"""Tests of the proxy's knowledge of an engine, which comes over a real control connection."""

import asyncio
from collections import Counter

import pytest

from sagellm.comm_backend.control import connect
from sagellm.comm_backend.group_info import EngineAddress
from sagellm.comm_backend.group_messages import EngineFacts, Hello, PrefixChange
from sagellm.core.hooks import EvictionReason
from sagellm.engines.lmdeploy.pd import watchers
from sagellm.pd.costs import OnlineCosts
from sagellm.pd.engine import Engine
from sagellm.pd.tokens import prefix_keys
from tests.engines.lmdeploy.pd.pair import NEW, Pair, key_file, wait_until
from tests.reference import make_prompts

BLOCK = 16


class Followed:
    """An engine as the proxy follows it. `costs`: all that came; the connection lives on the engine's own loop."""

    def __init__(self, engine, key):
        self._engine, self._key, self.costs, self.num_to_lose = engine, key, [], 0
        engine._on_loop(self._join())

    async def _join(self):
        pd = self._engine.hooks.pd
        early = []
        receive = [early.append]
        self.connection = await connect(pd._address, self._key, on_event=lambda _, event: receive[0](event))
        facts = await self.connection.call(Hello(engine_id="proxy"), 10, EngineFacts)
        info = EngineAddress(engine_id=facts.engine_id, role=facts.role, control=pd._address, model="")
        self.known = Engine(info, facts, self.connection, lambda one: asyncio.ensure_future(one.resync()))
        receive[0] = self._take
        for event in early:
            self._take(event)
        await self.known.resync()

    def _take(self, event):
        if self.num_to_lose and isinstance(event, PrefixChange):
            self.num_to_lose -= 1
            return
        self.known.on_event(event, OnlineCosts())
        self.costs += getattr(event, "costs", ())

    def cached(self, prompt):
        return self.known.cached_tokens(prefix_keys(prompt, BLOCK))

    def tokens(self):
        """Computed or moved, by kind of the step."""
        found = Counter()
        for one in self.costs:
            found[one.kind] += one.num_tokens
        return found

    def is_right(self):
        """Whether it is known exactly what the engine's own index has."""
        index = self._engine.hooks.cache.index
        own = {key for entry in index.entries() for key in prefix_keys(index.tokens(entry.entry_id).tolist(), BLOCK)}
        return set(self.known.mirror.index) == own and len(own) == index.num_blocks()

    def close(self):
        self._engine._on_loop(self.connection.close())


@pytest.fixture
def pair(start_engine, tmp_path):
    return Pair(start_engine, tmp_path, kv_blocks=26)


def test_what_is_cached_and_what_steps_take(pair, tmp_path, monkeypatch):
    prompts = make_prompts((40, 53, 70), seed=3)
    pair.ask(prompts[:1])
    key = key_file(tmp_path).read_bytes()
    prefill, decode = (Followed(engine, key) for engine in (pair.prefill, pair.decode))
    wait_until(lambda: prefill.cached(prompts[0]) == decode.cached(prompts[0]) == 32)
    assert not prefill.cached(prompts[1])

    pair.ask(prompts[1:])
    wait_until(lambda: prefill.is_right() and decode.is_right())
    assert [prefill.cached(prompt) for prompt in prompts] == [32, 48, 64]
    assert decode.cached(prompts[2]) >= 64

    # Each token once, wherever it was computed. Of each answer the first token comes from the prompt's step, and the second
    # from the step of one token with which a request begins where it decodes.
    num_tokens = sum(len(prompt) for prompt in prompts)
    wait_until(lambda: prefill.tokens() == {"prefill": num_tokens})
    wait_until(lambda: decode.tokens() == {"prefill": 3, "decode": 3 * (NEW - 2), "transfer": num_tokens})
    assert all(0 < one.seconds < 60 for one in (*prefill.costs, *decode.costs))
    moved = [one for one in decode.costs if one.kind == "transfer"]
    assert sorted(one.num_bytes for one in moved) == [len(prompt) * decode.known.facts.token_bytes for prompt in prompts]
    steps = [one for one in decode.costs if one.kind == "decode"]
    assert all(one.num_requests == one.num_tokens and one.num_context > 40 for one in steps)

    # Both pools are full, and give up the blocks that no request has asked for since.
    for number in range(4):
        pair.ask(make_prompts((90, 100), seed=20 + number))
    assert all(engine.hooks.kv.evicted[EvictionReason.PREFIX] for engine in (pair.prefill, pair.decode))
    wait_until(lambda: prefill.is_right() and decode.is_right())
    assert prefill.cached(prompts[0]) == 0

    # A lost event shows at the next one: a snapshot replaces the copy, and routing is right again.
    assert prefill.known.num_resyncs == 0
    prefill.num_to_lose = 1
    lost, seen = make_prompts((60, 75), seed=40)
    pair.ask([lost])
    wait_until(lambda: prefill.num_to_lose == 0)
    pair.ask([seen])
    wait_until(lambda: prefill.known.num_resyncs == 1 and prefill.is_right() and decode.is_right())
    assert (prefill.cached(lost), prefill.cached(seen)) == (48, 64) and decode.known.num_resyncs == 0

    # A snapshot in parts: changes that follow at once wait for all of them.
    monkeypatch.setattr(watchers, "MAX_KEYS", 1)
    pair.prefill._on_loop(prefill.known.resync())
    pair.ask(make_prompts((90, 100), seed=50))
    wait_until(lambda: prefill.is_right() and len(prefill.known.mirror) > 2)
    assert prefill.known.num_resyncs == 1

    prefill.close()
    decode.close()
    wait_until(lambda: not pair.prefill.hooks.pd._watchers._connections)
