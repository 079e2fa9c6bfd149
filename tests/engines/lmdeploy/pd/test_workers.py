"""The KV channels of an engine's workers, asked as one: of one worker in this process, and of two that are asked over control
connections, as worker processes are. Their threads run here; `test_tensor_parallel.py` has the processes."""

import asyncio
import copy
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from sagellm.comm_backend.control import connect
from sagellm.comm_backend.kv_transfer.base import TransferOptions, TransferPlan
from sagellm.comm_backend.kv_transfer.registry import make_channel
from sagellm.comm_backend.kv_transfer.turns import Turns
from sagellm.core.config import HookConfig
from sagellm.core.errors import (
    ConfigError,
    EngineError,
    PeerError,
    TransferCancelled,
    TransferError,
    TransferTimeoutError,
)
from sagellm.engines.lmdeploy.pd import calls, rank_server, ranks
from sagellm.engines.lmdeploy.pd.ranks import open_workers
from sagellm.engines.lmdeploy.pd.region import region_of
from tests.engines.lmdeploy.pd.caches import BLOCK_SIZE, HEAD_DIM, LAYERS, cache_engine
from tests.engines.lmdeploy.pd.pair import hooks, key_file, wait_until
from tests.pd.held_channel import HeldShm

HEADS, PEER_BLOCKS = 2, 5
TROUBLED = "tests.engines.lmdeploy.pd.test_workers:TroubledShm"


class TroubledShm(HeldShm):
    """A `HeldShm` whose transfers fail on each rank N with a file `failN`. A transfer that has ended leaves a file `leftN`."""

    name = "troubled"

    def _read_tokens(self, link, conversion, tokens, run):
        folder, rank = self.own_options.folder, self.region.layout.tp_rank
        try:
            if (folder / f"fail{rank}").exists():
                raise TransferError(f"planted on rank {rank}")
            super()._read_tokens(link, conversion, tokens, run)
        finally:
            (folder / f"left{rank}").touch()


class Side:
    """An engine's workers, and a peer of two ranks that they can read: `content` [2, layers, blocks, tokens, heads, width]."""

    def __init__(self, folder, num_ranks, channel="shm", **pd):
        options = {"folder": str(folder)} if channel == TROUBLED else {}
        self.pd = hooks("decode", key_file(folder), channel=channel, **{"channel_options": options} | pd)
        spec = HookConfig(pd=self.pd).model_dump_json()
        self.engines = [cache_engine(6, rank, num_ranks, sage=spec, num_heads=HEADS) for rank in range(num_ranks)]
        for tensor in (tensor for engine in self.engines for tensor in engine.full_gpu_cache):
            tensor.zero_()
        self.executor = SimpleNamespace(collective_rpc=self._call)
        if num_ranks == 1:
            self.executor.model_agent = SimpleNamespace(cache_engine=self.engines[0])
        self.workers = open_workers(self.executor, self.pd)
        shape = (2, LAYERS, PEER_BLOCKS, BLOCK_SIZE, HEADS, HEAD_DIM)
        self.content = torch.randn(shape, generator=torch.Generator().manual_seed(3))
        self.peer = [_owner(self, rank) for rank in range(2)]
        self.num_lost = 0

    def _call(self, method, args):
        return [getattr(engine, method)(*copy.deepcopy(args)) for engine in self.engines]

    async def __aenter__(self):
        await self.workers.start(self._on_lost)
        await self.workers.connect("peer", [channel.endpoint() for channel in self.peer])
        return self

    async def __aexit__(self, *_):
        await self.workers.close()
        for channel in self.peer:
            channel.close()
        self.engines.clear()  # with their memory their servers end

    def _on_lost(self):
        self.num_lost += 1

    def plan(self, name="one", **values):
        known = dict(block_ids=(4, 1), target_blocks=(0, 3), first_token=1, num_tokens=6, timeout_s=20.0)
        return TransferPlan(transfer_id=name, source="peer", **known | values)

    def is_here(self):
        """All that the plan wants, and nothing else."""
        wanted = torch.zeros(2, LAYERS, 6, BLOCK_SIZE, HEADS, HEAD_DIM)
        wanted[:, :, 0, 1:], wanted[:, :, 3, :3] = self.content[:, :, 4, 1:], self.content[:, :, 1, :3]
        found = [torch.cat([engine.full_gpu_cache[part] for engine in self.engines], 3) for part in (0, 1)]
        return torch.equal(torch.stack(found), wanted)


def _owner(side, rank):
    pd = hooks("prefill", side.pd.key_file, channel=side.pd.channel)
    engine = cache_engine(PEER_BLOCKS, rank, 2, sage=HookConfig(pd=pd).model_dump_json(), num_heads=HEADS)
    for tensor, values in zip(engine.full_gpu_cache, side.content, strict=True):
        tensor[:] = values[..., rank : rank + 1, :]
    return make_channel(side.pd.channel, region_of(engine), TransferOptions(key=b"k" * 32, options=side.pd.channel_options))


@pytest.fixture(params=[1, 2], ids=["in this process", "two workers"])
def num_ranks(request):
    return request.param


def run(work):
    return asyncio.run(asyncio.wait_for(work, 30))


# ---- both forms


def test_blocks_come_to_all_workers(tmp_path, num_ranks):
    async def work():
        async with Side(tmp_path, num_ranks) as side:
            layouts = [each.layout for each in side.workers.endpoints()]
            assert [(one.tp_rank, one.tp_size) for one in layouts] == [(rank, num_ranks) for rank in range(num_ranks)]
            assert side.workers.token_bytes() == 2 * LAYERS * HEADS * HEAD_DIM * 4
            sums = tuple(channel.checksums((4, 1)) for channel in side.peer)
            result = await side.workers.transfer(side.plan(checksums=sums))
            assert result.num_bytes == 6 * side.workers.token_bytes() and side.is_here()
            report = side.workers.report()
            assert (report["transfers"], report["bytes"], report["peers"]) == (1, result.num_bytes, 1)
            assert report["seconds"] == result.seconds > 0
            # The workers compute checksums of their own blocks, for others to check.
            own = await side.workers.checksums((0, 3))
            assert [len(each) for each in own] == [2] * num_ranks and own != await side.workers.checksums((1, 2))
            with pytest.raises(TransferError, match="differ from what was read"):
                await side.workers.transfer(side.plan(checksums=((1, 1), (1, 1))))
            with pytest.raises(TransferError, match=r"own blocks \[9\] are not there"):
                await side.workers.checksums((9,))
            await side.workers.disconnect("peer")
            with pytest.raises(TransferError, match="peer is unknown"):
                await side.workers.transfer(side.plan())
            report = side.workers.report()
            assert (report["transfers"], report["failed"], report["peers"], report["running"]) == (1, 2, 0, 0)
            side.workers.check()

    run(work())


def test_a_peer_that_does_not_fit(tmp_path, num_ranks):
    async def work():
        async with Side(tmp_path, num_ranks) as side:
            with pytest.raises(TransferError, match="endpoint 0 of 1 is that of rank 0 of 2"):
                await side.workers.connect("peer", [side.peer[0].endpoint()])

    run(work())


def test_transfers_are_stopped(tmp_path, num_ranks, monkeypatch):
    monkeypatch.setattr(calls, "AGAIN_S", 0.02)

    async def work():
        async with Side(tmp_path, num_ranks, TROUBLED) as side:
            hold = tmp_path / "hold"
            hold.touch()
            with pytest.raises(TransferTimeoutError):
                await side.workers.transfer(side.plan(timeout_s=0.1))
            moving = asyncio.create_task(side.workers.transfer(side.plan()))
            await asyncio.sleep(0)
            side.workers.cancel("nobody")
            (tmp_path / "began").unlink()
            while not (tmp_path / "began").exists():
                await asyncio.sleep(0.002)
            assert side.workers.report()["running"] == 1
            side.workers.cancel("one")
            with pytest.raises(TransferCancelled):
                await moving
            again = asyncio.create_task(side.workers.transfer(side.plan()))  # what was said of the former is not of this one
            await asyncio.sleep(0.1)
            hold.unlink()
            await again
            assert side.is_here()
            report = side.workers.report()
            assert (report["transfers"], report["timed_out"], report["cancelled"]) == (1, 1, 1)

    run(work())


def test_many_wait_no_longer_than_their_deadlines(tmp_path, num_ranks, monkeypatch):
    """More than may run at a time, of a peer that stands still; what ends them does not wait behind them."""
    wait, waiting = Turns._wait, []

    def note(self, run):
        waiting.append(run)
        wait(self, run)

    async def work():
        async with Side(tmp_path, num_ranks, TROUBLED) as side:
            hold, begin_s = tmp_path / "hold", time.monotonic()
            hold.touch()
            many = [asyncio.create_task(side.workers.transfer(side.plan(str(n), timeout_s=0.5))) for n in range(60)]
            found = await asyncio.gather(*many, return_exceptions=True)
            assert {type(each) for each in found} == {TransferTimeoutError}
            assert time.monotonic() - begin_s < 4.0, "they waited for each other's deadlines"
            monkeypatch.setattr(Turns, "_wait", note)
            many = [asyncio.create_task(side.workers.transfer(side.plan(str(n), timeout_s=60.0))) for n in range(20)]
            while len(waiting) < 16 * num_ranks:  # beside the four that run
                await asyncio.sleep(0.002)
            await side.workers.connect("other", [channel.endpoint() for channel in side.peer])
            assert not any(each.done() for each in many)
            await side.workers.disconnect("peer")
            found = await asyncio.wait_for(asyncio.gather(*many, return_exceptions=True), 20)
            assert {type(each) for each in found} == {TransferError}
            hold.unlink()
            await side.workers.transfer(side.plan().model_copy(update={"source": "other"}))
            assert side.is_here()

    run(work())


def test_cancelled_before_it_has_begun(tmp_path, num_ranks, monkeypatch):
    """The channel hears of it before it hears of the transfer itself."""
    transfer, cancel, was_cancelled = TroubledShm.transfer, TroubledShm.cancel, threading.Event()

    def late(self, plan):
        assert was_cancelled.wait(20)
        return transfer(self, plan)

    def too_early(self, transfer_id):
        found = cancel(self, transfer_id)
        was_cancelled.set()
        return found

    monkeypatch.setattr(TroubledShm, "transfer", late)
    monkeypatch.setattr(TroubledShm, "cancel", too_early)

    async def work():
        async with Side(tmp_path, num_ranks, TROUBLED) as side:
            (tmp_path / "hold").touch()
            moving = asyncio.create_task(side.workers.transfer(side.plan(timeout_s=60.0)))
            await asyncio.sleep(0)
            side.workers.cancel("one")
            with pytest.raises(TransferCancelled):
                await asyncio.wait_for(moving, 20)
            # A task that waits for a transfer and is cancelled, as at the engine's end, ends when nothing is written any more.
            moving = asyncio.create_task(side.workers.transfer(side.plan("two", timeout_s=60.0)))
            while not (tmp_path / "began").exists():
                await asyncio.sleep(0.002)
            moving.cancel()
            with pytest.raises(asyncio.CancelledError):
                await moving
            if num_ranks == 1:
                assert (tmp_path / "left0").exists() and side.workers.report()["running"] == 0

    run(work())


def test_the_end_waits_for_who_writes(tmp_path, num_ranks):
    async def work():
        async with Side(tmp_path, num_ranks, TROUBLED) as side:
            (tmp_path / "hold").touch()
            many = [asyncio.create_task(side.workers.transfer(side.plan(str(n), timeout_s=60.0))) for n in range(12)]
            while not (tmp_path / "began").exists():
                await asyncio.sleep(0.002)
        assert sum(thread.name == "sagellm-kv" for thread in threading.enumerate()) <= 1, "but for the one that closed it"
        found = await asyncio.wait_for(asyncio.gather(*many, return_exceptions=True), 20)
        assert all(isinstance(each, TransferError) for each in found)

    run(work())


def test_two_at_once_by_one_name(tmp_path, num_ranks):
    async def work():
        async with Side(tmp_path, num_ranks, TROUBLED) as side:
            (tmp_path / "hold").touch()
            moving = asyncio.create_task(side.workers.transfer(side.plan()))
            while not (tmp_path / "began").exists():
                await asyncio.sleep(0.002)
            with pytest.raises(TransferError, match="under way already"):
                await side.workers.transfer(side.plan())
            (tmp_path / "hold").unlink()
            await moving
            assert side.is_here()

    run(work())


# ---- workers elsewhere


def test_where_one_fails_the_others_are_stopped(tmp_path):
    async def work():
        async with Side(tmp_path, 2, TROUBLED) as side:
            (tmp_path / "hold").touch()
            (tmp_path / "fail1").touch()
            begin_s = time.monotonic()
            with pytest.raises(TransferError, match="planted on rank 1"):
                await side.workers.transfer(side.plan())
            assert time.monotonic() - begin_s < 10.0, "it waited for the deadline"
            # The first one waited, and writes no more when this is told.
            assert (tmp_path / "left0").exists() and side.workers.report()["failed"] == 1
            (tmp_path / "hold").unlink()
            (tmp_path / "fail1").unlink()
            await side.workers.transfer(side.plan())
            assert side.is_here() and not side.num_lost

    run(work())


def test_where_one_cannot_connect_none_is_connected(tmp_path, monkeypatch):
    async def work():
        async with Side(tmp_path, 2, TROUBLED) as side:
            connect_it, asked = TroubledShm.connect, []

            def refuse(self, *args, **kwargs):
                asked.append(self)
                if self.region.layout.tp_rank:
                    raise TransferError("planted")
                connect_it(self, *args, **kwargs)

            monkeypatch.setattr(TroubledShm, "connect", refuse)
            with pytest.raises(TransferError, match="planted"):
                await side.workers.connect("other", [channel.endpoint() for channel in side.peer])
            assert [channel.report()["peers"] for channel in asked] == [1, 1]
            with pytest.raises(TransferError, match="connected are: peer"):
                await side.workers.transfer(side.plan().model_copy(update={"source": "other"}))

    run(work())


def test_a_worker_that_has_gone(tmp_path):
    async def work():
        async with Side(tmp_path, 2, TROUBLED) as side:
            (tmp_path / "hold").touch()
            moving = asyncio.create_task(side.workers.transfer(side.plan()))
            while not (tmp_path / "began").exists():
                await asyncio.sleep(0.002)
            side.engines.pop()  # and its server with it
            with pytest.raises(TransferError, match="worker 1|channel (was|is) closed"):
                await moving
            wait = asyncio.get_running_loop().run_in_executor
            await wait(None, wait_until, lambda: side.num_lost)
            with pytest.raises(EngineError, match="worker 1 has gone; the engine cannot go on"):
                side.workers.check()

    run(work())


def test_workers_may_go_at_the_end(tmp_path):
    async def work():
        async with Side(tmp_path, 2) as side:
            side.workers.may_go()
            side.engines.clear()
            with pytest.raises(TransferError, match="worker 0: "):
                while True:
                    await side.workers.checksums((0,))
            side.workers.check()
            assert not side.num_lost

    run(work())


def test_a_worker_that_does_not_say_whether_it_still_writes(tmp_path, monkeypatch):
    monkeypatch.setattr(ranks, "SURE_S", 0.1)

    async def work():
        async with Side(tmp_path, 2, TROUBLED) as side:
            monkeypatch.setattr(TroubledShm, "transfer", lambda self, plan: time.sleep(1.0))
            with pytest.raises(TransferError, match="no reply within"):
                await side.workers.transfer(side.plan(timeout_s=0.1))
            assert side.num_lost == 1
            with pytest.raises(EngineError, match="whether it still writes"):
                side.workers.check()

    run(work())


def test_who_does_not_have_the_key_of_the_engine(tmp_path):
    """The key of the group is refused: only the workers' own engine may have them write into its blocks."""
    async def work():
        async with Side(tmp_path, 2) as side:
            with pytest.raises(PeerError, match="another key"):
                await connect(side.workers._addresses[0], side.pd.key_file.read_bytes().strip())

    run(work())


def test_what_keeps_a_worker_from_it_is_told_in_its_words(tmp_path, monkeypatch):
    """It would end its process to raise it."""
    with pytest.raises(TransferError, match="worker 0: options of KV channel shm: nothing"):
        Side(tmp_path, 2, channel_options={"nothing": 1})
    monkeypatch.setattr(rank_server, "HOST", "192.0.2.1")
    with pytest.raises(TransferError, match="worker 0: cannot listen for control connections on 192.0.2.1"):
        Side(tmp_path, 2)
    key_file(tmp_path).chmod(0o644)
    with pytest.raises(ConfigError, match="has mode 644"):
        Side(tmp_path, 1)
