"""The client against real servers: one that streams, and those that fail in every way it must survive."""

import asyncio
import json
import signal
import socket
import sys

import numpy as np
import pytest
from aiohttp import web

from benchmarks.load.client import PATHS, Client
from benchmarks.load.plan import Plan
from benchmarks.load.samples import read_samples

COMMAND = [sys.executable, "-m", "benchmarks.load.client"]
SECONDS = 30.0  # what must not happen within it is a failure


class Server:
    """Streams answers of every endpoint; `max_tokens` of a request picks what goes wrong."""

    BREAKS, FAILS, HANGS = 1001, 1002, 1003

    async def __aenter__(self):
        self.bodies, self.under_way, self.most_under_way = [], 0, 0
        self.hanging = asyncio.Event()
        app = web.Application()
        for path in PATHS.values():
            app.router.add_post(path, self.answer)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_):
        await self._runner.cleanup()

    async def answer(self, request):
        body = await request.json()
        self.bodies.append(body)
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        try:
            return await self._answer(request, body)
        finally:
            self.under_way -= 1

    async def _answer(self, request, body):
        if body["max_tokens"] == self.FAILS:
            return web.Response(status=500, text="out of\nluck")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        count = body["max_tokens"]
        for index in range(min(count, 3)):
            await response.write(event(request.path, index + 1, index + 1 == count))
            await asyncio.sleep(0)
        if count == self.BREAKS:
            request.transport.close()
        elif count == self.HANGS:
            self.hanging.set()
            await asyncio.Event().wait()
        await response.write(b"data: [DONE]\n\n")
        return response


def event(path, so_far, last):
    finish = "length" if last else None
    usage = {"prompt_tokens": 2, "completion_tokens": so_far}
    if path == PATHS["generate"]:
        message = {"text": "a", "meta_info": usage | {"finish_reason": finish and {"type": finish}}}
    elif path == PATHS["completions"]:
        message = {"choices": [{"text": "a", "finish_reason": finish}], "usage": usage if last else None}
    else:
        message = {"choices": [{"delta": {"content": "a"}, "finish_reason": finish}], "usage": usage if last else None}
    return f"data: {json.dumps(message)}\n\n".encode()


def make_plan(url, counts, **options):
    closed = "concurrency" in options
    requests = [
        {"text": "ab", "max_tokens": count, "scheduled_s": None if closed else 0.004 * index}
        for index, count in enumerate(counts)
    ]
    return Plan(url=url, requests=requests, **options)


async def run(plan, stopped=None):
    client = Client(plan)
    await asyncio.wait_for(client.run(stopped or asyncio.Event()), SECONDS)
    return client.samples(), client


def check_shape(samples):
    """Check the properties that all samples have, whatever happened."""
    n, m = len(samples.errors), len(samples.chunk_s)
    assert (samples.chunk_offsets[0], samples.chunk_offsets[-1], len(samples.chunk_offsets)) == (0, m, n + 1)
    assert len(samples.chunk_tokens) == m and (samples.chunk_tokens > 0).all()
    assert (samples.ok == (samples.errors == "")).all()
    for index in range(n):
        rows = slice(*samples.chunk_offsets[index : index + 2])
        times, tokens = samples.chunk_s[rows], samples.chunk_tokens[rows]
        assert tokens.sum() == samples.output_tokens[index]
        if len(times):
            assert samples.sent_s[index] <= samples.first_s[index] == times[0]
            assert times[-1] == samples.last_s[index] and (np.diff(times) >= 0).all()
        else:
            assert np.isnan(samples.first_s[index]) and np.isnan(samples.last_s[index])


@pytest.mark.parametrize("endpoint", PATHS)
def test_an_open_loop(endpoint, capsys):
    async def main():
        async with Server() as server:
            return await run(make_plan(server.url, [1, 2, 3, 3], endpoint=endpoint, model="m"))

    samples, client = asyncio.run(main())
    check_shape(samples)
    assert samples.ok.all()
    assert samples.output_tokens.tolist() == [1, 2, 3, 3]
    assert samples.prompt_tokens.tolist() == [2] * 4
    assert samples.scheduled_s.tolist() == pytest.approx([0, 0.004, 0.008, 0.012])
    assert (samples.sent_s >= samples.scheduled_s).all()
    lag = client.lag()
    assert lag.keys() == {"lag_mean_s", "lag_p99_s", "lag_share", "cpu_share"}
    assert lag["lag_mean_s"] == pytest.approx((samples.sent_s - samples.scheduled_s).mean())
    assert lag["lag_share"] == pytest.approx(lag["lag_mean_s"] / 0.004)
    assert json.loads(capsys.readouterr().out.splitlines()[0]) == {"done": 0, "of": 4}


def test_a_closed_loop_waits_for_answers():
    async def main():
        async with Server() as server:
            samples, client = await run(make_plan(server.url, [3] * 20, concurrency=4))
            assert server.most_under_way <= 4
            return samples, client

    samples, client = asyncio.run(main())
    check_shape(samples)
    assert samples.ok.all()
    # All but the first four were sent when an answer had ended.
    assert (samples.scheduled_s <= samples.sent_s).all()
    ends = np.sort(samples.last_s)
    assert (np.sort(samples.scheduled_s)[4:] >= ends[:-4]).all()
    assert client.lag()["lag_share"] >= 0


@pytest.mark.parametrize("options", [{}, {"concurrency": 1}])
def test_failures_do_not_hurt_the_others(options):
    async def main():
        async with Server() as server:
            counts = [2, Server.BREAKS, Server.FAILS, Server.HANGS, 3]
            return await run(make_plan(server.url, counts, timeout_s=2.5, **options))

    samples, _ = asyncio.run(main())
    check_shape(samples)
    assert samples.ok.tolist() == [True, False, False, False, True]
    assert samples.errors[1].startswith("ClientPayloadError")
    assert samples.errors[2] == "HTTP 500: out of luck"
    assert samples.errors[3] == "no whole answer within 2.5 s"
    assert samples.output_tokens[1] == samples.output_tokens[3] == 3  # what had come is kept


def test_a_server_that_is_not_there():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))  # the port is taken, but no server listens
        url = f"http://127.0.0.1:{probe.getsockname()[1]}"
        for options in ({}, {"concurrency": 2}):
            samples, _ = asyncio.run(run(make_plan(url, [1, 2, 3], **options)))
            check_shape(samples)
            assert not samples.ok.any()
            assert all(error.startswith("ClientConnectorError") for error in samples.errors)
            assert not np.isnan(samples.sent_s).any()


@pytest.mark.parametrize("options", [{}, {"concurrency": 2}])
def test_grace_ends_what_is_missing_after_the_last_send(options):
    async def main():
        async with Server() as server:
            return await run(make_plan(server.url, [2, Server.HANGS], grace_s=2.0, **options))

    samples, _ = asyncio.run(main())
    check_shape(samples)
    assert samples.errors.tolist() == ["", "no whole answer within 2 s of the last send"]


def test_stopping_keeps_what_is_there():
    async def main():
        async with Server() as server:
            stopped = asyncio.Event()
            work = asyncio.ensure_future(run(make_plan(server.url, [2, Server.HANGS, 2], concurrency=1), stopped))
            await asyncio.wait_for(server.hanging.wait(), SECONDS)
            stopped.set()
            return await work

    samples, _ = asyncio.run(main())
    check_shape(samples)
    assert samples.errors.tolist() == ["", "interrupted", "not sent"]
    assert np.isnan(samples.scheduled_s).tolist() == np.isnan(samples.sent_s).tolist() == [False, False, True]


async def start(folder, plan):
    plan.write(folder / "plan.json")
    return await asyncio.create_subprocess_exec(
        *COMMAND, folder / "plan.json", "--out", folder / "samples.npz", stdout=asyncio.subprocess.PIPE
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_a_readable_file(tmp_path, number):
    async def main():
        async with Server() as server:
            process = await start(tmp_path, make_plan(server.url, [2, Server.HANGS, 2], concurrency=1))
            await asyncio.wait_for(server.hanging.wait(), SECONDS)
            process.send_signal(number)
            out, _ = await asyncio.wait_for(process.communicate(), SECONDS)
            return process.returncode, out.splitlines()

    code, lines = asyncio.run(main())
    assert code == 0
    assert json.loads(lines[-1]).keys() == {"lag_mean_s", "lag_p99_s", "lag_share", "cpu_share"}
    samples = read_samples(tmp_path / "samples.npz")
    check_shape(samples)
    assert samples.errors.tolist() == ["", "interrupted", "not sent"]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["plan.json", "samples.npz"]


def test_a_process_to_its_end_with_nobody_reading(tmp_path):
    async def main():
        async with Server() as server:
            process = await start(tmp_path, make_plan(server.url, [Server.HANGS]))
            process._transport.get_pipe_transport(1).close()
            return await asyncio.wait_for(process.wait(), SECONDS)

    assert asyncio.run(main()) == 0
    assert not read_samples(tmp_path / "samples.npz").ok.any()


def test_misuse(tmp_path):
    async def main(*arguments):
        process = await asyncio.create_subprocess_exec(*COMMAND, *arguments, stderr=asyncio.subprocess.PIPE)
        _, err = await process.communicate()
        return process.returncode, err.decode()

    make_plan("http://127.0.0.1:1", [1]).write(tmp_path / "plan.json")
    for plan, out, message in (
        ("none.json", "samples.npz", "cannot read plan"),
        ("plan.json", "none/samples.npz", "cannot write"),
    ):
        code, err = asyncio.run(main(tmp_path / plan, "--out", tmp_path / out))
        assert code == 2 and err.startswith(f"Error: {message}") and err.count("\n") == 1
