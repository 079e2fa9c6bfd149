"""Ranks of groups of `shm` as processes of their own, and what they do in tests.

They are forked from a server that has torch loaded already; without pytest here, so that a rank is there in milliseconds.
"""

import multiprocessing
import os
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from sagellm.comm_backend import CommConfig, ReduceOp
from sagellm.comm_backend.shm import ShmBackend
from sagellm.core.errors import CommError

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.comm_backend.shm_ranks"])
GENEROUS_S = 60.0  # for what should not wait at all
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool)
SMALL = {"ring_bytes": 8192, "staging_bytes": 4096, "chunk_bytes": 1024, "heap_bytes": 1 << 20}


def run_ranks(body: Callable[..., Any], folder: Path, world_size: int, *args: Any, last: Any = (), **config: Any) -> list[Any]:
    """Return the result of `body(backend, *args)` on each rank, or the CommError it raised; None for a rank that was killed.

    `config` holds for all ranks. The values of `last` replace those of `config` for the last rank."""
    rendezvous = f"file://{folder}/meet-{os.urandom(4).hex()}"
    ranks = []
    for rank in range(world_size):
        values = {"backend": "shm", "rank": rank, "world_size": world_size, "rendezvous": rendezvous} | config
        values |= dict(last) if rank == world_size - 1 else {}
        ours, theirs = CONTEXT.Pipe(duplex=False)
        process = CONTEXT.Process(target=_rank, args=(body, CommConfig(**values), args, theirs))
        process.start()
        theirs.close()
        ranks.append((process, ours))
    answers = []
    for process, ours in ranks:
        try:
            answers.append(ours.recv() if ours.poll(GENEROUS_S) else "no answer")
        except EOFError:
            answers.append(None)
        process.join(GENEROUS_S)
        if process.is_alive():
            process.kill()
            answers[-1] = "did not end"
    return answers


def _rank(body: Callable[..., Any], config: CommConfig, args: tuple[Any, ...], answer: Connection) -> None:
    torch.set_num_threads(1)
    try:
        backend = ShmBackend(config)
        answer.send(body(backend, *args))
    except CommError as error:
        answer.send(error)


def caught(call: Callable[[], Any]) -> tuple[str, str] | None:
    try:
        call()
    except CommError as error:
        return type(error).__name__, str(error)
    return None


# ---- bodies; without an assertion of its own a body returns what its test looks at


def values(dtype: torch.dtype, num: int, rank: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(100 + rank)
    return torch.randint(0, 3, (num,), generator=random).to(dtype)


def messages(backend: ShmBackend, sizes: list[int]) -> None:
    """All pairs, both ways at once, several in a row; from the heap, and not."""
    me, works, wanted = backend.rank, [], []
    others = [rank for rank in range(backend.world_size) if rank != me]
    for dtype in DTYPES:
        for num in sizes:
            source = values(dtype, num, me)
            shared = backend.empty((num,), dtype)
            shared.copy_(source)
            for rank in others:
                works += [backend.send(tensor, rank, async_op=True) for tensor in (source, shared)]
                for target in (torch.empty_like(source), backend.empty((num,), dtype)):
                    works.append(backend.recv(target, rank, async_op=True))
                    wanted.append((target, values(dtype, num, rank)))
    for work in works:
        work.wait()
        work.wait()
        assert work.is_completed()
    for target, expected in wanted:
        assert torch.equal(target, expected), (target.dtype, target.shape)
    backend.barrier()  # a heap's tensors are read until then
    backend.close()


def collectives(backend: ShmBackend, sizes: list[int]) -> bytes:
    """Each against what torch says of the tensors of all ranks; the bits of a sum of floats."""
    me, world_size = backend.rank, backend.world_size
    for dtype in DTYPES:
        for num in sizes:
            tensors = [values(dtype, num, rank) for rank in range(world_size)]
            for op, reduce in {
                ReduceOp.SUM: torch.add, ReduceOp.PRODUCT: torch.mul, ReduceOp.MIN: torch.minimum, ReduceOp.MAX: torch.maximum
            }.items():  # fmt: skip
                expected = tensors[0]
                for other in tensors[1:]:
                    expected = reduce(expected, other)
                got = tensors[me].clone()
                backend.all_reduce(got, op)
                assert torch.equal(got, expected), (op, dtype, num)
            output = torch.empty((world_size, num), dtype=dtype)
            backend.all_gather(output, tensors[me])
            assert torch.equal(output, torch.stack(tensors)), dtype
            for src in range(world_size):
                got = tensors[me].clone()
                backend.broadcast(got, src)
                assert torch.equal(got, tensors[src]), dtype
            backend.barrier()
    with torch.inference_mode():
        floats = torch.randn(3000, generator=torch.Generator().manual_seed(me))
        work = backend.all_reduce(floats, async_op=True)
        scalar = torch.tensor(me + 1.0)
        backend.all_reduce(scalar)  # behind the one that was started
    work.wait()
    assert scalar.item() == world_size * (world_size + 1) / 2
    backend.close()
    return floats.numpy().tobytes()


def killed_in_a_message(backend: ShmBackend, killed: int) -> Any:
    """Rank 0 sends to 1; `killed` dies while it goes on, and the other is told."""
    pids = torch.empty(2, dtype=torch.int64)
    backend.all_gather(pids, torch.tensor(os.getpid()))
    message = torch.zeros(128 << 20, dtype=torch.uint8)  # through a ring so small that it takes a while
    if backend.rank == 0:
        message[0] = 1
        work = backend.send(message, 1, async_op=True)
        if killed == 1:
            backend.recv(pids, 1)  # the message has begun
    else:
        work = backend.recv(message, 0, async_op=True)
        while message[0] == 0:
            pass
        if killed == 1:
            backend.send(pids, 0)
    if backend.rank != killed:
        os.kill(int(pids[killed]), signal.SIGKILL)
    first = caught(work.wait)
    return first, caught(lambda: backend.recv(pids, 1 - backend.rank)), caught(backend.barrier)


def killed_in_a_collective(backend: ShmBackend) -> Any:
    if backend.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return caught(lambda: backend.all_reduce(torch.zeros(10)))


def silence(backend: ShmBackend) -> Any:
    tensor = torch.zeros(4)
    if backend.rank == 0:
        first = caught(lambda: backend.recv(tensor, 1, timeout_s=0.1))
    else:
        first = caught(lambda: backend.recv(tensor, 0))  # ends with the group
    return first, caught(lambda: backend.send(tensor, 1 - backend.rank)), caught(backend.barrier)


def different_messages(backend: ShmBackend) -> Any:
    if backend.rank == 0:
        backend.send(torch.zeros(4), 1)
        return caught(lambda: backend.recv(torch.zeros(1), 1))
    return caught(lambda: backend.recv(torch.zeros(2, 2), 0))


def different_collectives(backend: ShmBackend, kind: str) -> Any:
    first = backend.rank == 0
    if kind == "shape":
        return caught(lambda: backend.all_reduce(torch.zeros(4 if first else 5)))
    if kind == "dtype":
        return caught(lambda: backend.broadcast(torch.zeros(4, dtype=torch.int64 if first else torch.float64), 0))
    if kind == "op":
        return caught(lambda: backend.all_reduce(torch.zeros(4), ReduceOp.MIN if first else ReduceOp.MAX))
    return caught(backend.barrier if first else lambda: backend.all_reduce(torch.zeros(4)))


def one_leaves(backend: ShmBackend) -> Any:
    """A message that a rank sent before it left arrives. The next receive fails."""
    tensor = torch.full((10,), float(backend.rank))
    if backend.rank == 1:
        backend.send(tensor, 0)
        backend.close()
        return caught(backend.barrier)
    backend.recv(tensor, 1)
    assert (tensor == 1).all()
    return caught(lambda: backend.recv(tensor, 1))


def ends_without_close(backend: ShmBackend) -> Any:
    if backend.rank == 1:
        backend.barrier()
        backend.recv(torch.empty(3), 0, async_op=True)
        return None  # the interpreter ends with a thread that waits
    backend.barrier()
    return caught(lambda: backend.recv(torch.empty(3), 1))


def closed_while_waiting(backend: ShmBackend) -> Any:
    work = backend.recv(torch.empty(3), 1 - backend.rank, async_op=True)
    backend.close()
    return caught(work.wait), caught(lambda: backend.send(torch.empty(3), 1 - backend.rank))


def interrupted(backend: ShmBackend) -> Any:
    if backend.rank == 1:
        return caught(lambda: backend.recv(torch.empty(3), 0))

    def press(*_: object) -> None:
        if backend._recvs[1]._num_pending:
            raise KeyboardInterrupt

    signal.signal(signal.SIGALRM, press)
    signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)  # until it waits
    try:
        backend.recv(torch.empty(3), 1)
    except KeyboardInterrupt:
        signal.setitimer(signal.ITIMER_REAL, 0)
        return "interrupted"
    return "went on"


def heap(backend: ShmBackend) -> Any:
    """Filled, given back in any order, and whole again; a tensor outlives the group."""
    mine = [backend.empty((1 << 16,), torch.uint8) for _ in range(16)]
    full = caught(lambda: backend.empty((1,)))
    assert len({tensor.data_ptr() for tensor in mine}) == 16 and mine[0].data_ptr() % 64 == 0
    for place in (3, 5, 4, 15, 0, 1, 14, 2):
        mine[place] = torch.empty(0)
    assert backend.empty((5 << 15, 2), torch.uint8).shape == (5 << 15, 2)  # places 0 to 4, one after the other
    mine.clear()
    last = backend.empty((1 << 18,), torch.float32)
    backend.close()
    last.fill_(7)
    assert last.sum() == 7 << 18
    return full


def left_behind(backend: ShmBackend) -> Any:
    links = [os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()]
    return [link for link in links if "memfd" in link], os.listdir("/dev/shm")


def nothing(backend: ShmBackend) -> None:
    backend.barrier()
