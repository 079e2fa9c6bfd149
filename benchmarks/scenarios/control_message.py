"""A control message to another process of this host and its reply, against the same bytes over a plain stream of asyncio."""

import asyncio
import multiprocessing
import time
from collections.abc import Awaitable, Callable
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from pydantic import BaseModel

from benchmarks.result import Definition
from sagellm.comm_backend.control import ControlServer, connect, new_key, register

OPTIONS: dict[str, Any] = {"calls": 2000, "at_once": 32}
BATCH = 50  # calls of one contestant before the next has its turn
PLAIN_BYTES = 128  # about what a short question and its answer have as frames
NUMBERS = 128  # as many as blocks of a prompt of 8k tokens
DEFINITIONS = {
    f"control_message_{name}": Definition(unit=unit, better=better, text=text)
    for name, unit, better, text in (
        ("us", "us", "lower", "A short question until its short answer is there, one at a time, median."),
        ("p99_us", "us", "lower", "The same, of the slowest of a hundred."),
        ("long_us", "us", "lower", f"The same, of an answer with {NUMBERS} numbers, median."),
        ("stream_us", "us", None, f"{PLAIN_BYTES} bytes there and back through asyncio's streams, median."),
        ("over_stream", "1", "lower", "Ratio of the medians: what authentication, JSON, validation and tasks cost."),
        ("per_s", "1/s", "higher", "Messages that are answered in a second, `at_once` waiting at a time."),
    )
}


class TimedQuestion(BaseModel):
    number: int


class LongQuestion(BaseModel):
    number: int


class TimedAnswer(BaseModel):
    was_held: bool


class LongAnswer(BaseModel):
    number: int
    blocks: tuple[int, ...]
    age_s: float


register(TimedAnswer, LongAnswer)


def run(seed: int, calls: int, at_once: int) -> dict[str, float]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    key = new_key()
    process = context.Process(target=_serve, args=(theirs, key))
    process.start()
    theirs.close()
    try:
        return asyncio.run(_measure(*ours.recv(), key, calls, at_once))
    finally:
        ours.close()  # the server ends
        process.join(30)
        process.kill()


def _serve(parent: Connection, key: bytes) -> None:
    async def short(_: Any, message: TimedQuestion) -> TimedAnswer:
        return TimedAnswer(was_held=True)

    async def long(_: Any, message: LongQuestion) -> LongAnswer:
        return LongAnswer(number=message.number, blocks=tuple(range(NUMBERS)), age_s=0.01)

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                writer.write(await reader.readexactly(PLAIN_BYTES))
        except (asyncio.IncompleteReadError, OSError):
            writer.close()

    async def main() -> None:
        control = ControlServer(key, {TimedQuestion: short, LongQuestion: long})
        plain = await asyncio.start_server(echo, "127.0.0.1", 0)
        parent.send((await control.start("127.0.0.1"), plain.sockets[0].getsockname()[1]))
        ended = asyncio.Event()
        asyncio.get_running_loop().add_reader(parent.fileno(), ended.set)
        await ended.wait()
        plain.close()
        await control.close()

    asyncio.run(main())


async def _measure(address: str, port: int, key: bytes, calls: int, at_once: int) -> dict[str, float]:
    connection = await connect(address, key)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)

    async def short() -> None:
        await connection.call(TimedQuestion(number=1 << 62), 10, TimedAnswer)

    async def long() -> None:
        await connection.call(LongQuestion(number=1 << 62), 10, LongAnswer)

    async def plain() -> None:
        writer.write(bytes(PLAIN_BYTES))
        await reader.readexactly(PLAIN_BYTES)

    contestants = {"short": short, "long": long, "stream": plain}
    us: dict[str, list[float]] = {name: [] for name in contestants}
    try:
        for number in range(0, calls + BATCH, BATCH):
            for name, ask in contestants.items():
                taken = [await _timed(ask) for _ in range(BATCH)]
                us[name] += taken if number else []  # the first batch warms up
        per_s = await _throughput(short, calls, at_once)
    finally:
        await connection.close()
        writer.close()
        await writer.wait_closed()
    own, stream = float(np.median(us["short"])), float(np.median(us["stream"]))
    metrics = {
        "us": own, "p99_us": float(np.percentile(us["short"], 99)), "long_us": float(np.median(us["long"])),
        "stream_us": stream, "over_stream": own / stream, "per_s": per_s,
    }  # fmt: skip
    return {f"control_message_{name}": value for name, value in metrics.items()}


async def _timed(ask: Callable[[], Awaitable[None]]) -> float:
    start = time.perf_counter()
    await ask()
    return (time.perf_counter() - start) * 1e6


async def _throughput(ask: Callable[[], Awaitable[None]], calls: int, at_once: int) -> float:
    async def worker() -> None:
        for _ in range(-(-calls // at_once)):
            await ask()

    start = time.perf_counter()
    await asyncio.gather(*(worker() for _ in range(at_once)))
    return at_once * -(-calls // at_once) / (time.perf_counter() - start)
