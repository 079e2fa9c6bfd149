"""The client process: sends a plan's requests on time, stamps every chunk that comes back, and tells its own lag.

    python -m benchmarks.load.client PLAN.json --out samples.npz

Lines on standard output: {"done": k, "of": n} five times a second, and as the last one the lag (see `Client.lag`). They
must be read: when their reader has ended, the run ends as if interrupted.
SIGINT and SIGTERM end it early with what it has. Exit code 0, whatever the server did; 2 for a plan it cannot follow.
"""

import asyncio
import contextlib
import gc
import json
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Coroutine, Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

import aiohttp
import click
import numpy as np

from benchmarks.errors import BenchmarkError
from benchmarks.load.answer import ANSWERS, Answer, AnswerError
from benchmarks.load.plan import Plan, PlannedRequest, read_plan
from benchmarks.load.samples import Samples

PATHS = {"generate": "/generate", "completions": "/v1/completions", "chat": "/v1/chat/completions"}
# asyncio rounds timers up to whole milliseconds; the rest of the way to a send is spent polling.
POLL_S = 0.0015
TICK_S = 0.005
PROGRESS_S = 0.2
# Under the 5 s after which uvicorn closes idle connections: a request on one that is just closing would fail.
KEEP_ALIVE_S = 2.0
INTERRUPTED = "interrupted"


class Client:
    """One run of one plan. Times are seconds of `time.perf_counter` since `run` began."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._bodies = [encode(plan, request) for request in plan.requests]
        self._scheduled_s = [request.scheduled_s for request in plan.requests]
        self._sent_s: list[float | None] = [None] * len(plan.requests)
        self._answers: list[Answer | None] = [None] * len(plan.requests)
        self._errors = ["not sent"] * len(plan.requests)
        self._done = 0
        self._tasks: set[asyncio.Task] = set()
        self._all_sent = asyncio.Event()
        self._cut = INTERRUPTED  # why requests under way are cancelled
        self._ticks_s: list[float] = []
        self._cpu_share = 0.0

    async def run(self, stopped: asyncio.Event) -> None:
        """Until every request has an answer or an error, or `stopped` is set. Never raises for what a server does."""
        timeout = aiohttp.ClientTimeout(total=self._plan.timeout_s)
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S)
        self._session = aiohttp.ClientSession(
            connector=connector, timeout=timeout, cookie_jar=aiohttp.DummyCookieJar(), auto_decompress=False
        )
        self._headers = {"Content-Type": "application/json", "Accept-Encoding": "identity", **self._plan.headers}
        self._url = self._plan.url.rstrip("/") + PATHS[self._plan.endpoint]
        async with self._session:
            self._start_s, cpu_s = time.perf_counter(), time.process_time()
            with self._ticker():
                work, stop = asyncio.ensure_future(self._send_all()), asyncio.ensure_future(stopped.wait())
                report = asyncio.ensure_future(self._report(stopped))
                await asyncio.wait((work, stop), return_when=asyncio.FIRST_COMPLETED)
                await _cancel(work, stop, report, *self._tasks)
            self._cpu_share = (time.process_time() - cpu_s) / (time.perf_counter() - self._start_s)

    def samples(self) -> Samples:
        answers = [answer or Answer() for answer in self._answers]
        chunks = [answer.chunks() for answer in answers]
        return Samples(
            scheduled_s=_seconds(self._scheduled_s),
            sent_s=_seconds(self._sent_s),
            first_s=_seconds(times[0] if times else None for times, _ in chunks),
            last_s=_seconds(times[-1] if times else None for times, _ in chunks),
            prompt_tokens=np.array([answer.prompt_tokens for answer in answers], dtype=np.int64),
            output_tokens=np.array([answer.output_tokens for answer in answers], dtype=np.int64),
            ok=np.array([not error for error in self._errors]),
            chunk_offsets=np.array([0, *accumulate(len(times) for times, _ in chunks)], dtype=np.int64),
            chunk_s=_seconds(stamp for times, _ in chunks for stamp in times),
            chunk_tokens=np.array([count for _, counts in chunks for count in counts], dtype=np.int64),
            errors=np.array(self._errors, dtype=np.str_),
        )

    def lag(self) -> dict[str, float]:
        """How far the client itself was behind.

        Returns:
            lag_mean_s, lag_p99_s: open loop, sent less scheduled; closed loop, lateness of a 5 ms tick of the event loop.
            `lag_share`: the mean over the mean gap between sends (at least 1 ms), or over 5 ms.
            `cpu_share`: CPU time of this process over wall time.
        """
        late_s, gap_s = np.array(self._ticks_s), TICK_S
        if self._plan.concurrency is None:
            pairs = zip(self._scheduled_s, self._sent_s, strict=True)
            times = np.array([pair for pair in pairs if pair[1] is not None]).reshape(-1, 2)
            late_s = times[:, 1] - times[:, 0]
            gap_s = max(0.001, np.diff(times[:, 0]).mean()) if len(times) > 1 else TICK_S
        mean_s, p99_s = (float(late_s.mean()), float(np.quantile(late_s, 0.99))) if len(late_s) else (0.0, 0.0)
        return {
            "lag_mean_s": mean_s, "lag_p99_s": p99_s, "lag_share": mean_s / float(gap_s), "cpu_share": self._cpu_share
        }  # fmt: skip

    async def _send_all(self) -> None:
        if self._plan.concurrency is None:
            for index in range(len(self._bodies)):
                await self._until(self._scheduled_s[index])
                self._spawn(self._ask(index))
        else:
            queue = iter(range(len(self._bodies)))
            for _ in range(min(self._plan.concurrency, len(self._bodies))):
                self._spawn(self._user(queue))
        await self._all_sent.wait()
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=self._plan.grace_s)
            if late:
                self._cut = f"no whole answer within {self._plan.grace_s:g} s of the last send"
                await _cancel(*late)

    async def _user(self, queue: Any) -> None:
        for index in queue:
            self._scheduled_s[index] = time.perf_counter() - self._start_s
            await self._ask(index)

    async def _until(self, when_s: float) -> None:
        rest_s = when_s - (time.perf_counter() - self._start_s)
        if rest_s > POLL_S:
            await asyncio.sleep(rest_s - POLL_S)
        while time.perf_counter() - self._start_s < when_s:
            await asyncio.sleep(0)

    async def _ask(self, index: int) -> None:
        start_s, clock = self._start_s, time.perf_counter
        answer = self._answers[index] = ANSWERS[self._plan.endpoint]()
        self._sent_s[index] = clock() - start_s
        if index == len(self._sent_s) - 1:
            self._all_sent.set()
        try:
            async with self._session.post(self._url, data=self._bodies[index], headers=self._headers) as response:
                if response.status != 200:
                    raise AnswerError(f"HTTP {response.status}: {_line(await response.text())}")
                read = response.content.readany
                while data := await read():
                    answer.feed(clock() - start_s, data)
            answer.end()
            self._errors[index] = ""
        except asyncio.CancelledError:
            self._errors[index] = self._cut
            raise
        except asyncio.TimeoutError:
            self._errors[index] = f"no whole answer within {self._plan.timeout_s:g} s"
        except AnswerError as error:
            self._errors[index] = str(error)
        except Exception as error:  # whatever it was, the other requests go on
            self._errors[index] = f"{type(error).__name__}: {_line(str(error))}"
        self._done += 1

    def _spawn(self, work: Coroutine) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _report(self, stopped: asyncio.Event) -> None:
        while _say({"done": self._done, "of": len(self._bodies)}):
            await asyncio.sleep(PROGRESS_S)
        stopped.set()  # the reader of the samples has ended

    @contextlib.contextmanager
    def _ticker(self) -> Iterator[None]:
        """In a closed loop, note every 5 ms how late the event loop is. A thread: asyncio's own timers are coarse."""
        if self._plan.concurrency is None:
            yield
            return
        loop, done = asyncio.get_running_loop(), threading.Event()

        def tick() -> None:
            when_s = time.perf_counter()
            while not done.is_set():
                when_s += TICK_S
                time.sleep(max(0.0, when_s - time.perf_counter()))
                loop.call_soon_threadsafe(lambda when_s=when_s: self._ticks_s.append(time.perf_counter() - when_s))

        thread = threading.Thread(target=tick, daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()


def encode(plan: Plan, request: PlannedRequest) -> bytes:
    """The request's body. Always streams: the first token's time of an answer that comes whole is not known."""
    body: dict[str, Any] = {
        "max_tokens": request.max_tokens, "temperature": 0, "ignore_eos": True, "stream": True
    }  # fmt: skip
    if request.service is not None:
        body |= request.service.model_dump(exclude_defaults=True)
    if plan.endpoint == "generate":
        body |= {"input_ids": request.prompt_ids} if request.prompt_ids else {"prompt": request.text}
        return json.dumps(body).encode()
    body |= {"model": plan.model, "stream_options": {"include_usage": True}}
    if request.seed is not None:
        body["seed"] = request.seed
    if plan.endpoint == "chat":
        body["messages"] = [{"role": "user", "content": request.text}]
    else:
        body["prompt"] = request.prompt_ids or request.text
    return json.dumps(body).encode()


async def _run(client: Client, signals: list[int]) -> None:
    stopped, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopped.set)
    if signals:
        stopped.set()
    await client.run(stopped)


async def _cancel(*tasks: asyncio.Future) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _seconds(values: Any) -> np.ndarray:
    return np.array([np.nan if value is None else value for value in values], dtype=np.float64)


def _say(values: dict[str, Any]) -> bool:
    """One JSON line on standard output; Return False if its reader has ended."""
    try:
        print(json.dumps(values), flush=True)
        return True
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains at its end
        return False


def _line(text: str, most: int = 200) -> str:
    return " ".join(text.split())[:most]


@click.command()
@click.argument("plan", type=click.Path(path_type=Path))
@click.option("--out", required=True, type=click.Path(path_type=Path, dir_okay=False), help="Samples, a .npz file.")
def main(plan: Path, out: Path) -> None:
    """Send the requests of PLAN."""
    signals: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: signals.append(number))
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a connection for each request under way
    draft = out.with_name(out.name + ".tmp.npz")
    if not plan.parent.exists():
        sys.exit(1)  # the caller was interrupted meanwhile and has removed its folder
    try:
        client = Client(read_plan(plan))
        draft.touch()
    except BenchmarkError as error:
        click.echo(f"Error: {error}", err=True)
        sys.exit(2)
    except OSError as error:
        click.echo(f"Error: cannot write {out}: {error.strerror}", err=True)
        sys.exit(2)
    gc.collect()
    gc.freeze()  # what is here already lasts; collections during the run stay short
    asyncio.run(_run(client, signals))
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    client.samples().write(draft)
    os.replace(draft, out)
    _say(client.lag())


if __name__ == "__main__":
    main()
