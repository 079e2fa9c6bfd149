"""The engine process hears every call, whatever it sends meanwhile; and what it sends does not hold up its end."""

import asyncio
import copy
import multiprocessing
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from multiprocessing.shared_memory import SharedMemory

import numpy as np
import pytest
from lmdeploy.messages import EngineOutput, GenerationConfig, ResponseType
from lmdeploy.pytorch.engine.executor.mp_executor import Notifier, SharedBuffer
from lmdeploy.pytorch.engine.mp_engine.zmq_rpc import AsyncRPCClient, AsyncRPCServer

from benchmarks.processes import free_port
from sagellm.core.errors import EngineError
from sagellm.engines.lmdeploy import rpc

LIMIT_S = 30.0
# An engine process in small. SIGTERM comes while its only task makes the bytes of an answer. The task `late` answers when the
# socket has been closed, as a call does that an engine ends.
ENDED = """
import asyncio, os, signal, time
from lmdeploy.pytorch.engine.mp_engine import zmq_rpc

zmq_rpc.logger.setLevel("WARNING")

class Answer:
    def __reduce__(self):
        os.kill(os.getpid(), signal.SIGTERM)
        end = time.monotonic() + 0.3
        while time.monotonic() < end:
            pass
        print("whole", flush=True)
        return int, ()

async def slow():
    return Answer()

async def late():
    try:
        await asyncio.sleep(60)
    except asyncio.CancelledError:
        return None

server, loop = zmq_rpc.AsyncRPCServer(), asyncio.new_event_loop()
signal.signal(signal.SIGTERM, lambda *_: exit(0))
server.register_method("slow", slow)
server.register_method("late", late)
print(server.port, flush=True)
try:
    loop.run_until_complete(server.run())
finally:
    left = sorted(asyncio.all_tasks(loop), key=lambda task: task.get_name().startswith("late"))  # the socket closes first
    for task in left:
        task.cancel()
    loop.run_until_complete(asyncio.wait(left))
    print([task.exception() for task in left if not task.cancelled()], flush=True)
"""


class Server(AsyncRPCServer):
    """A server in a thread of its own. `slow` holds the loop between a pause and its answer until `release` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.holds, self.release = threading.Event(), threading.Event()
        self.register_method("slow", self.slow)
        self.register_method("quick", lambda: "quick")
        self.register_method("stop", self.stop)
        self.register_method("count", self.count)
        self.thread = threading.Thread(target=lambda: asyncio.run(self.run()))

    async def slow(self) -> str:
        await asyncio.sleep(0.05)  # the server waits for calls by then
        self.holds.set()
        assert self.release.wait(LIMIT_S)
        return "slow"

    async def count(self, numbers: int, fault: str = "") -> AsyncIterator[EngineOutput]:
        """Yield numbers, one in each turn of the loop."""
        for number in range(numbers):
            await asyncio.sleep(0)
            yield EngineOutput(ResponseType.SUCCESS, [number], logprobs=[{number: -1.0}])
        if fault:
            raise ValueError(fault)


class Client(AsyncRPCClient):
    """Gets outputs sent; keeps the messages that came."""

    def __init__(self, port: int) -> None:
        super().__init__(port)
        rpc.SentOutputs(self)
        self.messages, take = [], self._set_reply
        self._set_reply = lambda message: (self.messages.append(message), take(message))

    async def tokens(self, numbers: int, pause_s: float = 0.0, fault: str = "") -> list[list[int]]:
        found = []
        async for output in self.async_stream_call("count", numbers, fault=fault):
            await asyncio.sleep(pause_s)
            assert output.logprobs == [{token: -1.0} for token in output.token_ids]
            found.append(output.token_ids)
        return found


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rpc, "LOOK_S", 2 * LIMIT_S)  # a call that is missed is answered too late for the test
    server = Server()
    server.thread.start()
    yield server
    client = AsyncRPCClient(server.get_port())
    client.call("stop")
    client.close_sockets()
    server.thread.join(LIMIT_S)
    assert not server.thread.is_alive()


def test_a_call_that_comes_while_an_answer_goes_out_is_heard(server: Server):
    async def ask() -> list[str]:
        client = AsyncRPCClient(server.get_port())
        slow = asyncio.create_task(client.async_call("slow"))
        assert await asyncio.to_thread(server.holds.wait, LIMIT_S)
        quick = asyncio.create_task(client.async_call("quick"))
        await asyncio.sleep(0.2)  # it lies in the server's socket, where the answer to `slow` meets it
        server.release.set()
        try:
            return await asyncio.wait_for(asyncio.gather(slow, quick), LIMIT_S)
        finally:
            client.stop()

    assert asyncio.run(ask()) == ["slow", "quick"]


def test_outputs_of_one_turn_are_one_message(server: Server):
    async def ask() -> tuple[list, int]:
        client = Client(server.get_port())
        found = await asyncio.wait_for(asyncio.gather(*[client.tokens(50) for _ in range(8)]), LIMIT_S)
        client.stop()
        return found, sum("outputs" in each for each in client.messages)

    found, messages = asyncio.run(ask())
    assert [list(chain(*each)) for each in found] == [list(range(50))] * 8
    assert messages < 8 * 50 / 2


def test_outputs_that_nobody_has_read_are_joined_and_none_is_lost(server: Server):
    """ZeroMQ's own limit is 1000 messages at either end, beside the buffers of the connection."""
    numbers = 20_000

    async def ask() -> list[list[int]]:
        client = Client(server.get_port())
        reading = asyncio.create_task(client.tokens(numbers, pause_s=0.01))
        while not client.messages:
            await asyncio.sleep(0)
        time.sleep(3.0)  # the server goes on meanwhile
        try:
            return await asyncio.wait_for(reading, LIMIT_S)
        finally:
            client.stop()

    found = asyncio.run(ask())
    assert list(chain(*found)) == list(range(numbers))
    assert len(found) < numbers / 10


def test_a_stream_that_fails_raises_after_its_outputs(server: Server):
    async def ask() -> list[int]:
        client, found = Client(server.get_port()), []
        with pytest.raises(EngineError, match="out of numbers"):
            async for output in client.async_stream_call("count", 3, fault="out of numbers"):
                found += output.token_ids
        client.stop()
        return found

    assert asyncio.run(ask()) == [0, 1, 2]


def test_a_reader_that_leaves_holds_up_nobody(server: Server):
    async def ask() -> list[list[int]]:
        client = Client(server.get_port())
        leaving = client.async_stream_call("count", 1000)
        await anext(leaving)
        await leaving.aclose()
        found = await asyncio.wait_for(client.tokens(5), LIMIT_S)
        client.stop()
        return found

    assert list(chain(*asyncio.run(ask()))) == list(range(5))


@pytest.mark.slow
def test_sigterm_interrupts_no_answer():
    async def ask(client: AsyncRPCClient) -> int:
        late = asyncio.create_task(client.async_call("late"))
        await asyncio.sleep(0)
        answer = await asyncio.wait_for(client.async_call("slow"), LIMIT_S)
        late.cancel()
        return answer

    command = [sys.executable, "-c", ENDED]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            client = AsyncRPCClient(int(process.stdout.readline()))
            assert asyncio.run(ask(client)) == 0
            client.stop()
            out, err = process.communicate(timeout=LIMIT_S)
        finally:
            process.kill()
    assert (process.returncode, out, err) == (0, "whole\n[None]\n", "")


def test_a_call_to_a_process_that_dies_fails():
    process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,), daemon=True)
    process.start()
    client = AsyncRPCClient(free_port())  # none listens there
    rpc.fail_when_dead(client, process)
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(client.call, "get_schedule_metrics")
        with pytest.raises(TimeoutError):
            call.result(timeout=3 * rpc.DEAD_S)
        process.kill()
        with pytest.raises(EngineError, match="ended with code -9"):
            call.result(timeout=LIMIT_S)
    client.async_socket.close(0)
    client.sync_socket.close(0)
    client.async_ctx.term()
    client.sync_ctx.term()


def test_a_buffer_closes_while_a_message_waits_in_it():
    """As when a tensor-parallel engine ends: what it still sends is held by a task that never goes on."""
    buffer = SharedBuffer(-1, Notifier(1, multiprocessing.get_context("spawn")))
    waiting = buffer.pack_data("a step", 1)
    next(waiting)
    buffer.close()
    with pytest.raises(FileNotFoundError):
        SharedMemory(buffer.name())


@pytest.fixture
def ring():
    """`ring(n)`: the sender's end of LMDeploy's ring of messages, and the ends of n receivers."""
    buffers = []

    def make(num_receivers: int) -> list[SharedBuffer]:
        notifier = Notifier(num_receivers, multiprocessing.get_context("spawn"))
        buffers.append(SharedBuffer(-1, notifier))
        # Each process has a copy of the notifier, which counts for itself.
        buffers.extend(SharedBuffer(number, copy.copy(notifier), buffers[0].name()) for number in range(num_receivers))
        return buffers

    yield make
    for buffer in reversed(buffers):
        buffer.close()


def test_a_message_follows_one_whose_sender_has_not_gone_on(ring):
    """The receiver may have answered before the task of the first message runs again."""
    sender, receiver = ring(1)

    async def play() -> None:
        sending = []
        for number in range(100):
            sending.append(asyncio.create_task(sender.send_async(number)))
            await asyncio.sleep(0)
            assert receiver.receive() == number
        await asyncio.gather(*sending)

    asyncio.run(play())


def test_the_slowest_receiver_gets_every_message(ring):
    sender, *receivers = ring(2)

    def receive(buffer: SharedBuffer, delay_s: float) -> list[int]:
        found = []
        for _ in range(200):
            time.sleep(delay_s)
            found.append(buffer.receive())
        return found

    with ThreadPoolExecutor(2) as pool:
        answers = [pool.submit(receive, buffer, delay_s) for buffer, delay_s in zip(receivers, (0, 0.001), strict=True)]
        for number in range(200):
            sender.send(number)
        assert [each.result(LIMIT_S) for each in answers] == [list(range(200))] * 2


@pytest.mark.parametrize("moment", ["the turn that brings it", "before a late step"])
def test_a_request_that_is_cancelled_answers_its_caller(start_engine, moment):
    """LMDeploy may forget to. A caller that waits for ever would hold an instance for ever."""
    engine = start_engine()

    async def leave() -> list[ResponseType]:
        asking, leaving = engine.engine.create_instance(), engine.engine.create_instance()

        async def ask() -> list[ResponseType]:
            answer = asking.async_stream_infer(7, [5, 6, 7], GenerationConfig(ignore_eos=True, max_new_tokens=10_000))
            return [output.status async for output in answer]

        asked = asyncio.create_task(ask())
        if moment == "the turn that brings it":  # the cancellation is carried out first
            await asyncio.create_task(leaving.async_cancel(7))
            await leaving.async_end(7)
        else:
            while 7 not in (sessions := engine.engine.scheduler.sessions) or not sessions[7].sequences:
                await asyncio.sleep(0)
            (response,) = [seq.resp for seq in sessions[7].sequences.values()]
            engine.engine.end_session(7)
            engine.engine._response(response, ResponseType.SUCCESS, data={"token_ids": np.array([5]), "logits": None})
        return await asyncio.wait_for(asked, LIMIT_S)

    assert engine._on_loop(leave())[-1] is ResponseType.CANCEL
