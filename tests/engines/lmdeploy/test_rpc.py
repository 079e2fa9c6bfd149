"""The engine process hears every call, whatever it sends meanwhile; and what it sends does not hold up its end."""

import asyncio
import multiprocessing
import threading
from multiprocessing.shared_memory import SharedMemory

import pytest
from lmdeploy.pytorch.engine.executor.mp_executor import Notifier, SharedBuffer
from lmdeploy.pytorch.engine.mp_engine.zmq_rpc import AsyncRPCClient, AsyncRPCServer

from sagellm.engines.lmdeploy import rpc

LIMIT_S = 30.0


class Server(AsyncRPCServer):
    """A server in a thread of its own. `slow` holds the loop between a pause and its answer until `release` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.holds, self.release = threading.Event(), threading.Event()
        self.register_method("slow", self.slow)
        self.register_method("quick", lambda: "quick")
        self.register_method("stop", self.stop)
        self.thread = threading.Thread(target=lambda: asyncio.run(self.run()))

    async def slow(self) -> str:
        await asyncio.sleep(0.05)  # the server waits for calls by then
        self.holds.set()
        assert self.release.wait(LIMIT_S)
        return "slow"


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


def test_a_buffer_closes_while_a_message_waits_in_it():
    """As when a tensor-parallel engine ends: what it still sends is held by a task that never goes on."""
    buffer = SharedBuffer(-1, Notifier(1, multiprocessing.get_context("spawn")))
    waiting = buffer.pack_data("a step", 1)
    next(waiting)
    buffer.close()
    with pytest.raises(FileNotFoundError):
        SharedMemory(buffer.name())
