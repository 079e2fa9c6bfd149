"""A prefill/decode group of which an engine is killed again and again: what becomes of the requests, and of the blocks."""

import asyncio
import contextlib
import random
import time
from collections import Counter
from typing import Any

import aiohttp
import psutil

from benchmarks.errors import BenchmarkError
from benchmarks.pd.client import Reply, Request, ask, ask_all
from benchmarks.pd.group import Group, pd_group, single_server
from benchmarks.pd.memory import EngineMemory
from benchmarks.pd.prompts import mixed_requests
from benchmarks.processes import metrics_of
from benchmarks.result import Definition

OPTIONS: dict[str, Any] = {
    "requests": 2000, "seconds": 300.0, "kill_every_s": 20.0, "prefill": 1, "decode": 2, "texts": 200, "limit_s": 120.0,
    "channel": "shm",
    "warm_up": 150,  # without kills it takes 200 to 300 until nearly all of the pool and of a peer's has been touched
}  # fmt: skip
DEFINITIONS = {
    "pd_faults_wrong": Definition(
        unit="1", better="lower",
        text="Answers that differ from those of one engine, as far as they were sent. `requests` greedy requests come at "
        "random times within `seconds`. Every `kill_every_s` one of `prefill` and `decode` engines, at random, is killed "
        "(SIGKILL), and `sagellm pd up` starts it again.",
    ),
    "pd_faults_hung": Definition(unit="1", better="lower", text="Requests without an answer or error within `limit_s`."),
    "pd_faults_unclear": Definition(
        unit="1", better="lower", text="Requests that ended without an answer and without a sentence that says why."
    ),
    "pd_faults_whole": Definition(unit="1", better=None, text="Requests with a whole answer."),
    "pd_faults_failed": Definition(unit="1", better="lower", text="Requests that were told that they have failed."),
    "pd_faults_kills": Definition(unit="1", better=None, text="Engines that were killed."),
    "pd_faults_blocks_lost": Definition(
        unit="1", better="lower", text="Blocks that engines still hold when all requests have ended and leases are over."
    ),
    "pd_faults_held": Definition(unit="1", better="lower", text="Prompts still held for others, and waited for, by then."),
    "pd_faults_growth_mib": Definition(
        unit="MiB", better="lower", text="Memory of the manager at the end, less what it had after the first tenth of the time."
    ),
    "pd_faults_engine_growth_kib": Definition(
        unit="KiB", better="lower",
        text="Growth of private memory for each request. Private memory is RSS without shared memory: libraries, and KV "
        "blocks, whose pages come when they are first used. It is that of an engine's server and the processes below it, every "
        "two seconds, over the prompts that were computed for others or by others, after the first `warm_up`. The growth is "
        "the line of least squares through all engines; each engine that was started anew has a level of its own.",
    ),
    "pd_faults_engine_requests": Definition(
        unit="1", better=None, text="Requests of engines over which that growth was seen, each counted by both its engines."
    ),
}  # fmt: skip
POOL = ("--dtype", "float32", "--kv-blocks", "384", "--pd-lease-s", "10", "--pd-timeout-s", "10")
SINGLE_POOL = POOL[:4]
SETTLE_S = 45.0


def run(
    seed: int, requests: int, seconds: float, kill_every_s: float, prefill: int, decode: int, texts: int, limit_s: float,
    channel: str, warm_up: int,
) -> dict[str, float]:  # fmt: skip
    source = random.Random(seed)
    known = mixed_requests(texts, seed, lengths=(8, 400), outputs=(8, 32))
    with single_server(SINGLE_POOL) as server:
        replies = ask_all(server.url, known)
    if any(each.error for each in replies):
        raise BenchmarkError(f"a server alone failed: {next(each.error for each in replies if each.error)}")
    expected = [each.text for each in replies]
    flags = ["--prefill", str(prefill), "--decode", str(decode), "--policy", "always-split"]
    with pd_group(flags, serve=(*POOL, "--kv-channel", channel)) as group:
        ask_all(group.url, known[:20])
        drill = _Drill(group, source, known, expected, seconds, kill_every_s, limit_s, warm_up)
        return asyncio.run(drill.run(requests))


class _Drill:
    def __init__(
        self, group: Group, source: random.Random, known: list[Request], expected: list[str], seconds: float,
        kill_every_s: float, limit_s: float, warm_up: int,
    ) -> None:  # fmt: skip
        self._group, self._source, self._known, self._expected = group, source, known, expected
        self._seconds, self._kill_every_s, self._limit_s = seconds, kill_every_s, limit_s
        self._num_kills = 0
        self._memory: list[float] = []
        self._engines = EngineMemory(warm_up)

    async def run(self, requests: int) -> dict[str, float]:
        times = sorted(self._source.uniform(0, self._seconds) for _ in range(requests))
        which = [self._source.randrange(len(self._known)) for _ in times]
        killing = asyncio.create_task(self._kill())
        watching = [asyncio.create_task(each) for each in (self._watch(), self._watch_engines())]
        timeout = aiohttp.ClientTimeout(total=self._limit_s)
        start_s = time.perf_counter()
        async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as http:

            async def one(at_s: float, number: int) -> tuple[Reply, str]:
                await asyncio.sleep(at_s - (time.perf_counter() - start_s))
                return await ask(http, self._group.url, self._known[number]), self._expected[number]

            pairs = await asyncio.gather(*map(one, times, which))
            killing.cancel()
            left = await self._settle(http)
        for task in watching:
            task.cancel()
        await asyncio.wait(watching)
        for task in watching:
            if not task.cancelled():
                task.result()  # raises what went wrong
        outcome = Counter(_outcome(reply, text) for reply, text in pairs)
        for reply, text in pairs:
            if _outcome(reply, text) in ("wrong", "hung", "unclear"):
                print(f"{_outcome(reply, text)}: {reply.status} {reply.error!r}: {reply.text!r} of {text!r}", flush=True)
        tenth = max(1, len(self._memory) // 10)
        figures = {name: outcome[name] for name in ("wrong", "hung", "unclear", "whole", "failed")} | left
        figures |= {"kills": self._num_kills, "growth_mib": (self._memory[-1] - self._memory[tenth - 1]) / 2**20}
        growth = self._engines.growth()
        if not growth.num_requests:
            raise BenchmarkError("no engine was seen twice after its `warm_up` requests; choose fewer, or more requests")
        figures |= {"engine_growth_kib": growth.bytes_per_request / 2**10, "engine_requests": growth.num_requests}
        return {f"pd_faults_{name}": float(value) for name, value in figures.items()}

    async def _kill(self) -> None:
        while True:
            await asyncio.sleep(self._kill_every_s)
            victims = [each for each in self._servers() if each.status() != psutil.STATUS_ZOMBIE]
            if victims:
                victim = self._source.choice(victims)
                # The engine process below the server, or the server: one dies of the other's death.
                below = [each for each in victim.children(recursive=True) if "resource_tracker" not in " ".join(each.cmdline())]
                (self._source.choice([victim, *below])).kill()
                self._num_kills += 1

    def _servers(self) -> list[psutil.Process]:
        top = psutil.Process(self._group.process.pid)
        found = []
        for each in top.children():
            with contextlib.suppress(psutil.Error):  # it has just ended
                if "--role" in each.cmdline():
                    found.append(each)
        return found

    async def _watch(self) -> None:
        proxy = psutil.Process(self._group.process.pid)
        while True:
            self._memory.append(proxy.memory_info().rss)
            await asyncio.sleep(1.0)

    async def _watch_engines(self) -> None:
        while True:
            await asyncio.to_thread(self._engines.look, self._servers())
            await asyncio.sleep(2.0)

    async def _settle(self, http: aiohttp.ClientSession) -> dict[str, float]:
        """When engines that live hold nothing any more, or `SETTLE_S` have passed: what they hold."""
        left: dict[str, float] = {"blocks_lost": -1, "held": -1}
        end_s = time.perf_counter() + SETTLE_S
        while time.perf_counter() < end_s:
            try:
                pages = await asyncio.gather(*(asyncio.to_thread(metrics_of, each["url"]) for each in self._group.engines()))
            except OSError:  # one is starting still
                await asyncio.sleep(1.0)
                continue
            active = 'sagellm_kv_blocks{state="active"}'
            running = [f'sagellm_pd_running{{side="{side}"}}' for side in ("offers", "arrivals")]
            left = {
                "blocks_lost": sum(page[active] for page in pages),
                "held": sum(page[name] for page in pages for name in running),
            }
            if not any(left.values()):
                break
            await asyncio.sleep(1.0)
        return left


def _outcome(reply: Reply, expected: str) -> str:
    if reply.error == "timeout":
        return "hung"
    if not expected.startswith(reply.text):
        return "wrong"
    if not reply.error:
        return "whole" if reply.text == expected else "wrong"
    return "failed" if _is_clear(reply) else "unclear"


def _is_clear(reply: Reply) -> bool:
    """A sentence, not a broken connection or a page of a framework."""
    return len(reply.error.split()) >= 4 and "the stream ended before" not in reply.error and "ClientError" not in reply.error
