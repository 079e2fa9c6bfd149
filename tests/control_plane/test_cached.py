"""Routing by what engines have cached: real engines in this process, the fleet that serves a gateway, and its tables."""

import asyncio
import contextlib
import itertools
import random
from pathlib import Path

import pytest
import yaml
from aiohttp import web

from benchmarks.processes import free_port
from sagellm.comm_backend.control import check_request, new_key, read_key
from sagellm.control_plane import cached
from sagellm.control_plane.base import Candidates, EngineState, EngineView, RouteRequest
from sagellm.control_plane.engine import ManagedEngine
from sagellm.control_plane.fleet import Fleet
from sagellm.control_plane.holders import Holders
from sagellm.control_plane.kinds.openai import OpenAIEndpoint
from sagellm.control_plane.kinds.sagellm import SageLLM
from sagellm.control_plane.metrics import GatewayMetrics
from sagellm.control_plane.probe import EngineFacts
from sagellm.control_plane.registry import make_router
from sagellm.core.config import PDHooks
from sagellm.core.running import SamplingParams
from sagellm.pd.bodies import Body
from sagellm.pd.tokens import prefix_keys
from tests.reference import make_prompts

PATH, MODEL, BLOCK = "/v1/completions", "tiny", 16
WAIT_S = 60.0


class Plain:
    """The twin of `Holders`: a look at all engines."""

    def __init__(self):
        self.of = {}

    def add(self, engine, hashes):
        self.of.setdefault(engine, set()).update(hashes)

    def drop(self, engine, hashes):
        self.of.get(engine, set()).difference_update(hashes)

    def longest(self, hashes, names):
        nums = {
            name: next((n for n, each in enumerate(hashes) if each not in self.of.get(name, ())), len(hashes)) for name in names
        }
        most = max(nums.values())
        return most, {name for name, num in nums.items() if num == most and num}


def test_the_table_of_all_engines_against_a_look_at_each():
    chance = random.Random(5)
    names = [f"e{number}" for number in range(6)]
    engines = [EngineView(name, "hybrid", num_running=number) for number, name in enumerate(names)]
    prompts = [[group * 100 + place for place in range(12)] for group in range(4)]
    table, plain, has = Holders(), Plain(), {}
    for _ in range(2000):
        name, group = chance.choice(names), chance.randrange(4)
        before, after = has.get((name, group), 0), chance.randrange(13)
        has[name, group] = after
        for each in (table, plain):
            each.add(name, prompts[group][:after])
            each.drop(name, prompts[group][after:before])
        among = Candidates.of(chance.sample(engines, chance.randint(1, 6)))
        for hashes in prompts:
            most, best = plain.longest(hashes, among.names)
            assert table.longest(hashes, among) == (most, min(best) if most else "")
    for name in names:
        table.drop(name, [each for hashes in prompts for each in hashes])
    assert not len(table)


class Node:
    """A real engine, at the URL of a server that says who it is."""

    def __init__(self, start, file):
        self._start, self._file, self.url = start, file, f"http://127.0.0.1:{free_port()}"
        self.up()

    def up(self):
        pd = PDHooks(role=None, engine_id=self.url, key_file=self._file)
        self.engine = self._start(pd=pd, kv_blocks=26)

    def computed(self, prompts):
        """Send requests to the engine itself."""
        return asyncio.to_thread(self.engine.generate, prompts, SamplingParams(max_new_tokens=2))

    def own(self):
        """Return the prefix keys of the engine's own index."""
        index = self.engine.hooks.cache.index
        return {key for entry in index.entries() for key in prefix_keys(index.tokens(entry.entry_id).tolist(), BLOCK)}

    async def _info(self, request):
        check_request(self._file.read_bytes(), "GET", "/sage/pd/info", b"", request.headers)
        address = await asyncio.to_thread(lambda: self.engine.group_address)
        return web.json_response({"engine_id": self.url, "role": "hybrid", "control": address, "model": MODEL})

    @contextlib.asynccontextmanager
    async def serving(self):
        app = web.Application()
        app.router.add_get("/sage/pd/info", self._info)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", int(self.url.rpartition(":")[2])).start()
        try:
            yield self
        finally:
            await runner.cleanup()


async def until(what, condition):
    end = asyncio.get_running_loop().time() + WAIT_S
    while not condition():
        assert asyncio.get_running_loop().time() < end, f"not within {WAIT_S} s: {what}"
        await asyncio.sleep(0.02)


class Routed:
    """A fleet whose engines a and b are these nodes."""

    def __init__(self, folder, file, nodes):
        self.fleet = Fleet(make_router("prefix"), GatewayMetrics())
        self.nodes = dict(zip("ab", nodes, strict=True))
        for name, node in self.nodes.items():
            kind = OpenAIEndpoint(node.url, feed_key_file=file, tokenizer=str(folder))
            engine = ManagedEngine(
                name, kind, self.fleet.metrics, interval_s=1.0, accept=lambda *_: None, changed=self.fleet._note_change,
                loaded=lambda _: None,
            )  # fmt: skip
            engine.facts = EngineFacts((MODEL,), (PATH,))
            self.fleet.engines[name] = engine
            engine._become(EngineState.READY)

    async def request(self, prompt):
        found = await self.fleet.prefixes.prompt(PATH, Body(b"", {"model": MODEL, "prompt": prompt}))
        return RouteRequest(len(prompt), model=MODEL, path=PATH, cached=found)

    async def choice(self, prompt):
        """The choice for a prompt that is not sent."""
        self.fleet.choose(await self.request(prompt), self.fleet.candidates(MODEL, PATH))
        return tuple(self.fleet.decisions[-1][name] for name in ("engine", "reason"))

    def index(self, name):
        return self.fleet.prefixes.index(name)

    def is_right(self, name):
        return self.index(name) is not None and set(self.index(name)) == self.nodes[name].own()


@pytest.fixture
def key_file(tmp_path):
    file = tmp_path / "key"
    file.touch(0o600)
    file.write_bytes(new_key())
    return file


def test_real_engines_and_what_they_have_cached(start_engine, model_folder, key_file, monkeypatch):
    monkeypatch.setattr(cached, "EVENTS_S", 0.05)
    monkeypatch.setattr(cached, "AGAIN_S", 0.05)
    nodes = [Node(start_engine, key_file) for _ in range(2)]
    seen, *others, more, lost, after, last = make_prompts((50, 90, 90, 90, 90, 90, 70, 40, 40, 60), seed=3)

    async def play():
        async with contextlib.AsyncExitStack() as stack:
            for node in nodes:
                await stack.enter_async_context(node.serving())
            routed = Routed(model_folder("llama"), key_file, nodes)
            try:
                await follow(routed)
            finally:
                await routed.fleet.prefixes.close()

    async def follow(routed):
        fleet, (a, b) = routed.fleet, nodes
        await until("both tell", lambda: routed.index("a") is not None and routed.index("b") is not None)

        # A request that came directly to the engine is found.
        assert (await routed.choice(seen))[1] == "least load"
        with monkeypatch.context() as context:
            context.setattr(b.engine.hooks.pd, "ended", lambda session: None)  # a step tells, not the end of a request
            await b.computed([seen])
            await until("its events", lambda: routed.is_right("b") and len(routed.index("b")))
        assert await routed.choice(seen) == ("b", "longest prefix cached")
        assert fleet.decisions[-1]["detail"] == "48 of 50 tokens are cached on b"
        found = (await routed.request(seen)).cached
        assert (found.tokens_on("a"), found.tokens_on("b"), found.tokens_on("c")) == (0, 48, None)

        # A prefix that the engine has evicted is not looked for there.
        await b.computed(others)
        await until("its eviction", lambda: routed.is_right("b") and found.tokens_on("b") == 0)
        assert (await routed.choice(seen))[1] == "least load"

        # A prompt that goes to an engine counts until the engine's events can be here, and no longer.
        request = await routed.request(more)
        fleet.note_begin(fleet.engines["b"], request)
        fleet.note_begin(fleet.engines["a"])  # so that b is not chosen for its load
        fleet.note_begin(fleet.engines["a"])
        assert await routed.choice(more[:-1]) == ("b", "longest prefix sent")
        assert (await routed.request(more)).cached.tokens_on("b") == 0
        fleet.note_end(fleet.engines["b"], request)
        await until("it counts no more", lambda: not fleet.prefixes.status("b")["expected_prefixes"])
        assert (await routed.choice(more))[1] == "least load" and routed.is_right("b")

        # A lost event is noticed at the next one, and a snapshot repairs the copy.
        engine, dropped = fleet.prefixes._engines["a"], []
        receive = engine.on_event
        engine.on_event = lambda event, costs: (
            dropped.append(event) if hasattr(event, "stored") and not dropped else receive(event, costs)
        )
        await a.computed([lost])
        await until("the loss", lambda: dropped)
        assert (await routed.choice(lost))[1] == "least load" and not routed.is_right("a")
        await a.computed([after])
        await until("the repair", lambda: routed.is_right("a"))
        assert fleet.prefixes.status("a")["resyncs"] == 1
        for prompt in (lost, after):
            assert await routed.choice(prompt) == ("a", "longest prefix cached")

        # An engine that starts again has nothing, and tells what it caches from then on.
        await asyncio.to_thread(a.engine.close)
        await until("its end", lambda: routed.index("a") is None)
        assert (await routed.choice(lost))[1] == "least load"
        await asyncio.to_thread(a.up)
        await until("its start", lambda: routed.index("a") is not None)
        assert not len(routed.index("a")) and (await routed.choice(lost))[1] == "least load"
        await a.computed([last])
        await until("its events", lambda: routed.is_right("a") and len(routed.index("a")))
        assert await routed.choice(last) == ("a", "longest prefix cached")

        # An engine that is not followed leaves nothing behind.
        for name in "ab":
            fleet.prefixes.leave(name)
        assert not any(map(len, itertools.chain(*fleet.prefixes.tables.values())))
        assert await routed.choice(last) == ("b", "least load")

    asyncio.run(play())


def test_a_model_without_a_tokenizer_here_is_routed_by_text(key_file, tmp_path, caplog):
    """Engines tell, and their tokens mean nothing here."""
    (tmp_path / "config.json").write_text("{}")

    async def play():
        fleet = Fleet(make_router("prefix"), GatewayMetrics())
        kind = OpenAIEndpoint("http://127.0.0.1:9", feed_key_file=key_file)
        kind.model_folder = lambda: tmp_path
        engine = ManagedEngine(
            "a", kind, fleet.metrics, interval_s=1.0, accept=lambda *_: None, changed=fleet._note_change, loaded=lambda _: None
        )
        engine.facts = EngineFacts((MODEL,), (PATH,))
        fleet.engines["a"] = engine
        engine._become(EngineState.READY)
        await until("the attempt", lambda: "are routed by their text" in caplog.text)
        assert await fleet.prefixes.prompt(PATH, Body(b"", {"model": MODEL, "prompt": "x" * 600})) is None
        await fleet.prefixes.close()

    asyncio.run(play())


@pytest.mark.parametrize(
    ("router", "settings", "tells"),
    [
        ("prefix", {}, True), ("prefix", {"prefix_caching": False}, False), ("prefix", {"sot_workers": 1}, False),
        ("prefix", {"engine": "turbomind"}, False), ("least-load", {}, False),
    ],
)  # fmt: skip
def test_which_engines_of_a_manager_are_to_tell(router, settings, tells, model_folder):
    fleet = Fleet(make_router(router), GatewayMetrics())
    fleet.http = None
    kind = SageLLM(str(model_folder("llama")), **settings)
    kind.attach(fleet, "a")
    command = kind.command(1)
    try:
        written = yaml.safe_load(Path(command[command.index("--config") + 1]).read_text())
        assert ("pd" in written) == tells
        if tells:
            assert read_key(Path(written["pd"]["key_file"])) == fleet.prefixes.key
        assert kind.model_folder() == model_folder("llama")
    finally:
        asyncio.run(kind.stop())
