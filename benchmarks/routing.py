"""Routers of the gateway: prefixes found and first tokens on a trace, on a virtual clock; the time of a decision.

    python -m benchmarks.routing [--trace FILE] [--out FILE]

An engine computes one prompt after the other and decodes all answers side by side, at the speeds that are given. Its prefix
cache forgets the block that was used longest ago; `prefix` remembers as many tokens of each engine. Round robin, least load and
prefix see the same requests, and the engines through the `Fleet` that serves a gateway. Routers see four bytes for each token
of a prompt. `prefix` also runs with engines that tell what they have cached, at once; its prompts are tokenized before.
"""

import heapq
import itertools
import time
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import click
import numpy as np

from benchmarks.contestants import summary
from benchmarks.output import Output, table, with_output
from sagellm.comm_backend.group_info import EngineAddress
from sagellm.comm_backend.group_messages import EngineFacts as GroupFacts
from sagellm.control_plane.base import EngineState, RouteRequest
from sagellm.control_plane.engine import ManagedEngine
from sagellm.control_plane.fleet import Fleet
from sagellm.control_plane.kinds.openai import OpenAIEndpoint
from sagellm.control_plane.metrics import GatewayMetrics
from sagellm.control_plane.probe import ROUTES, EngineFacts
from sagellm.control_plane.registry import make_router
from sagellm.control_plane.routers.prefix import BLOCK
from sagellm.core.config import MAX_CACHED_BLOCK_SIZE
from sagellm.pd.engine import Engine
from sagellm.pd.tokens import prefix_keys
from sagellm.replay.base import Trace
from sagellm.replay.generate import generate
from sagellm.replay.traces import read_trace

PATH, MODEL = ROUTES[0], "m"
NAMES = ("round-robin", "least-load", "prefix")
TELL = ", engines tell"


def make_fleet(router: str, num_engines: int, **options: Any) -> Fleet:
    """A fleet whose engines are ready, without servers."""
    fleet = Fleet(make_router(router, **options), GatewayMetrics())
    for number in range(num_engines):
        name = f"e{number:04d}"
        engine = ManagedEngine(
            name, OpenAIEndpoint(url="http://127.0.0.1:9"), fleet.metrics, interval_s=1.0, accept=lambda *_: None,
            changed=lambda _: None, loaded=lambda _: None,
        )  # fmt: skip
        engine.state, engine.facts = EngineState.READY, EngineFacts((MODEL,), ROUTES)
        fleet.engines[name] = engine
    return fleet


@dataclass
class SimulatedEngine:
    """Prompts one after the other, and a prefix cache.

    Attributes:
        capacity: blocks of the cache.
        free_at_s: when all prompts that came are computed.
    """

    capacity: int
    free_at_s: float = 0.0
    cache: OrderedDict[int, None] = field(default_factory=OrderedDict)

    def find(self, keys: list[int]) -> tuple[int, list[int]]:
        """Return how many blocks of a prompt are cached, and those that give way. Caches all of the prompt."""
        num_hits = len(list(itertools.takewhile(self.cache.__contains__, keys)))
        for key in reversed(keys):
            self.cache[key] = None
            self.cache.move_to_end(key)
        gone = []
        while len(self.cache) > self.capacity:
            gone.append(self.cache.popitem(last=False)[0])
        return num_hits, gone


@dataclass(frozen=True)
class Speeds:
    """Attributes: prefill: tokens of prompts a second. itl_s: seconds from a token of an answer to the next."""

    prefill: float
    itl_s: float


def prompts(trace: Trace) -> Iterator[tuple[float, list[int], bytes, int, int]]:
    """Yield arrival, keys, bytes, tokens of the prompt and of the answer."""
    for number, (start, end) in enumerate(itertools.pairwise(trace.offsets.tolist())):
        keys = trace.keys[start:end]
        text = np.repeat(keys, trace.block_size // 2).tobytes()  # four bytes for each token
        yield (
            float(trace.times_s[number]), keys.tolist(), text, int(trace.input_tokens[number]), int(trace.output_tokens[number])
        )  # fmt: skip


def run(
    trace: Trace, fleet: Fleet, capacity: int, speeds: Speeds, speedup: float, tells: bool = False
) -> dict[str, float]:  # fmt: skip
    """`tells`: whether the engines tell what they have cached."""
    size, hashes = min(trace.block_size, MAX_CACHED_BLOCK_SIZE), {}
    if tells:
        let_tell(fleet, size)
    engines = {name: SimulatedEngine(capacity) for name in fleet.engines}
    ends: list[tuple[float, int, ManagedEngine]] = []
    first_s, num_hits = [], 0
    for number, (arrival_s, keys, text, num_tokens, num_answered) in enumerate(prompts(trace)):
        now_s = arrival_s / speedup
        while ends and ends[0][0] <= now_s:
            fleet.note_end(heapq.heappop(ends)[2])
        request = RouteRequest(num_tokens, model=MODEL, path=PATH, prompt=text)
        if tells:
            tokens = tokens_of(text)
            request = replace(request, cached=fleet.prefixes.of(tokens))
            parts, num = prefix_keys(tokens, size), trace.block_size // size
            hashes |= {key: parts[num * place : num * (place + 1)] for place, key in enumerate(keys)}
        engine = fleet.choose(request, fleet.candidates(MODEL, PATH))
        fleet.note_begin(engine)
        there = engines[engine.name]
        found, gone = there.find(keys)
        if tells:
            index = fleet.prefixes.index(engine.name)
            index.store(itertools.chain(*map(hashes.get, keys[found:])))
            index.remove(itertools.chain(*map(hashes.get, gone)))
        num_hits += found
        left = max(1, num_tokens - found * trace.block_size)
        there.free_at_s = max(there.free_at_s, now_s) + left / speeds.prefill
        first_s.append(there.free_at_s - now_s)
        heapq.heappush(ends, (there.free_at_s + num_answered * speeds.itl_s, number, engine))
    p50, p95 = np.percentile(first_s, [50, 95]).tolist()
    return {"hit_rate": num_hits / trace.num_accesses, "ttft_p50_s": p50, "ttft_p95_s": p95}


def tokens_of(text: bytes) -> list[int]:
    return np.frombuffer(text, np.int32).tolist()


def let_tell(fleet: Fleet, block_size: int = 64) -> None:
    """Make the fleet take its engines for such that tell what they have cached: nothing yet."""
    for name in fleet.engines:
        url, model = f"http://{name}", {"model": MODEL, "role": "hybrid"}
        facts = GroupFacts(
            engine_id=url, instance=name, weights="", channel="", endpoints=(), block_size=block_size, num_blocks=8192,
            token_bytes=0, timeout_s=1.0, **model,
        )  # fmt: skip
        fleet.prefixes.take(name, Engine(EngineAddress(engine_id=url, control="", **model), facts, None))


def decision_us(router: str, num_engines: int, prompt_bytes: int, num: int, tells: bool = False) -> np.ndarray:
    """Return microseconds of each decision: candidates, choice, counters and the load of the engine. float64 [num].

    Args:
        tells: whether the engines tell what they have cached; they cache what they are sent.
    """
    fleet = make_fleet(router, num_engines)
    if tells:
        let_tell(fleet)
    chance = np.random.default_rng(1)
    begun = [chance.bytes(prompt_bytes // 2) for _ in range(200)]
    texts = [begun[int(chance.integers(200))] + chance.bytes(prompt_bytes // 2) for _ in range(2 * num)]
    requests, keys = [], {}
    for text in texts:
        cached = None
        if tells:  # the gateway does it on another thread
            cached, keys[text] = fleet.prefixes.of(tokens_of(text)), prefix_keys(tokens_of(text), 64)
        requests.append(RouteRequest(prompt_bytes // 4, model=MODEL, path=PATH, prompt=text, cached=cached))
    running: list[tuple[ManagedEngine, RouteRequest]] = []
    seconds = []
    for number, request in enumerate(requests):
        start = time.perf_counter()
        engine = fleet.choose(request, fleet.candidates(MODEL, PATH))
        fleet.note_begin(engine, request)
        seconds.append(time.perf_counter() - start)
        running.append((engine, request))
        if len(running) > 3 * num_engines:
            engine, request = running.pop(number % len(running))
            fleet.note_end(engine)
            if tells:
                fleet.prefixes.index(engine.name).store(keys.pop(request.prompt))
                request.cached.settle(engine.name)
    return np.array(seconds[num:]) * 1e6


@click.command(help=__doc__.split("\n")[0])
@click.option("--trace", "source", default="conversation:requests=12000,seed=1", show_default=True,
              help="Trace file, or a generator with its options.")
@click.option("--engines", default=4, show_default=True, help="Engines of the trace.")
@click.option("--capacity", default=8192, show_default=True, help="Blocks of an engine's prefix cache.")
@click.option("--prefill", default=20000.0, show_default=True, help="Tokens of prompts that an engine computes a second.")
@click.option("--itl-ms", default=20.0, show_default=True, help="Time from a token of an answer to the next.")
@click.option("--speedup", default=1.0, show_default=True, help="Requests arrive so many times as fast.")
@click.option("--many", default=1000, show_default=True, help="Engines of the timed decisions.")
@click.option("--decisions", default=5000, show_default=True, help="Decisions that are timed.")
@click.option("--rounds", default=5, show_default=True, help="Times that they are timed.")
@with_output
def main(
    output: Output, source: str, engines: int, capacity: int, prefill: float, itl_ms: float, speedup: float, many: int,
    decisions: int, rounds: int,
) -> None:  # fmt: skip
    times: dict[str, list[list[float]]] = {}  # before the garbage collector has a trace to look through
    for _, name, size in itertools.product(range(rounds), NAMES, (2048, 32768)):
        for tells in (False, True) if name == "prefix" else (False,):
            row = times.setdefault(f"{name}, {size} bytes{TELL if tells else ''}", [])
            row.append(np.percentile(decision_us(name, many, size, decisions, tells), [50, 99]).tolist())
    decided = {
        name: dict(zip(("median_us", "p99_us"), map(summary, zip(*row, strict=True)), strict=True))
        for name, row in times.items()
    }
    trace = read_trace(Path(source)) if Path(source).exists() else generate(source)
    speeds = Speeds(prefill, itl_ms / 1000)
    known = {"prefix": {"capacity": max(1, capacity * trace.block_size * 4 // BLOCK)}}
    figures = {
        name: run(trace, make_fleet(name, engines, **known.get(name, {})), capacity, speeds, speedup) for name in NAMES
    }
    figures[f"prefix{TELL}"] = run(trace, make_fleet("prefix", engines), capacity, speeds, speedup, tells=True)
    # The bound of every router: one engine with the caches of all.
    figures["one cache of all"] = run(
        trace, make_fleet("least-load", 1), engines * capacity, Speeds(engines * prefill, speeds.itl_s), speedup
    )
    base = figures["round-robin"]
    for row in figures.values():
        row |= {"of_round_robin": row["hit_rate"] / base["hit_rate"]}
    names = ("hit_rate", "of_round_robin", "ttft_p50_s", "ttft_p95_s")
    rows = [(router, *(f"{row[name]:.3f}" for name in names)) for router, row in figures.items()]
    output.say(table(["router", "hit rate", "of round robin", "TTFT p50 (s)", "TTFT p95 (s)"], rows))
    output.say(table(
        [f"a decision among {many} engines", "median (us)", "p99 (us)"],
        [(name, *(f"{one['median']:.0f} ({one['low']:.0f}-{one['high']:.0f})" for one in row.values()))
         for name, row in decided.items()],
    ))  # fmt: skip
    options = {
        "trace": Path(trace.name).name, "sha256": trace.sha256, "requests": trace.num_requests, "block_size": trace.block_size,
        "engines": engines, "capacity": capacity, "prefill_tokens_s": prefill, "itl_ms": itl_ms, "speedup": speedup,
        "many": many, "rounds": rounds,
    }  # fmt: skip
    output.finish({"options": options, "figures": figures, "decisions": decided})


if __name__ == "__main__":
    main()
