"""Mooncake and NIXL, the libraries themselves, between real processes: bytes, deadlines, deaths, and who may take part."""

import os
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from benchmarks.processes import wait_until
from sagellm.comm_backend.kv_transfer.base import TransferOptions, TransferPlan
from sagellm.comm_backend.kv_transfer.nixl import MODULES
from sagellm.comm_backend.kv_transfer.registry import find_channel, make_channel
from sagellm.core.errors import TransferCancelled, TransferError, TransferTimeoutError
from tests.comm_backend.kv_transfer.owner import OwnerProcess, layout, region

KEY = b"a key of the group"


@pytest.fixture(params=["mooncake", "nixl"])
def name(request):
    if missing := find_channel(request.param).missing():
        pytest.skip(missing)
    return request.param


@pytest.fixture
def own_options(name):
    """Within a host UCX reads the memory of a process that stands still; only over TCP it waits for it."""
    return {"transports": "tcp"} if name == "nixl" else {}


@pytest.fixture
def owner(name, own_options):
    """`owner(layout, seed=, key=)`: a process; killed afterwards."""
    started = []

    def start(of, **change):
        started.append(OwnerProcess(name, of, options=own_options, **change))
        return started[-1]

    yield start
    for each in started:
        each.close()


@pytest.fixture
def channel(name, own_options):
    """`channel(layout, key=)`: in this process, its blocks all zero."""
    opened = []

    def open_(of, key=KEY, seed=None, **options):
        made = make_channel(name, region(name, of, seed), TransferOptions(key=key, options=own_options, **options))
        opened.append(made)
        return made

    yield open_
    for each in opened:
        each.close()


def plan(transfer_id="t", src=(5, 2, 7), dst=(1, 0, 3), **change):
    values = dict(transfer_id=transfer_id, source="p", block_ids=src, target_blocks=dst, num_tokens=12, timeout_s=30)
    return TransferPlan(**(values | change))


def tokens(tensor, blocks, first, num):
    """[layers, tokens, heads, width] of a request whose first token is the first of its first block."""
    rows = tensor[:, list(blocks)].flatten(1, 2)
    return rows[:, first : first + num]


def written(channel):
    return any(tensor.any() for tensor in channel.region.tensors)


def test_blocks_come_over(owner, channel):
    theirs = owner(layout(num_blocks=9))
    own = channel(layout(num_blocks=5))
    own.connect("p", [theirs.endpoint])
    result = own.transfer(plan())
    assert result.num_bytes == 12 * own.region.layout.token_bytes()
    for tensor, expected in zip(own.region.tensors, theirs.content(), strict=True):
        assert torch.equal(tensor[:, [1, 0, 3]], expected[:, [5, 2, 7]])
        assert not tensor[:, [2, 4]].any()  # these blocks were not asked for
    assert own.report()["transfers"] == 1


@pytest.mark.slow
def test_much_more_than_one_reads_at_once(owner, channel):
    """More requests than are under way at once, and blocks larger than what is read at once."""
    of = layout(num_blocks=40, block_size=64, layers=3, heads=4, width=128)  # 128 KiB a block, layer and part
    theirs, own = owner(of), channel(of)
    own.connect("p", [theirs.endpoint])
    blocks = tuple(reversed(range(1, 40, 2)))
    own.transfer(plan(src=blocks, dst=tuple(range(20)), num_tokens=64 * 20))
    large = layout(num_blocks=2, block_size=1024, layers=3, heads=4, width=128)
    bigger = channel(large)
    bigger.connect("p", [theirs.endpoint])
    bigger.transfer(plan(src=blocks, dst=(1, 0), num_tokens=64 * 20))
    for tensor, other, expected in zip(own.region.tensors, bigger.region.tensors, theirs.content(), strict=True):
        assert torch.equal(tensor[:, :20], expected[:, list(blocks)])
        assert torch.equal(tokens(other, (1, 0), 0, 1280), tokens(expected, blocks, 0, 1280))


@pytest.mark.slow
def test_other_block_size_and_tensor_parallel_ranks(owner, channel):
    """Two ranks with a head each, blocks of 4 tokens; here one rank with both, blocks of 16; and the other way round."""
    ranks = [owner(layout(heads=1, rank=rank, ranks=2)) for rank in range(2)]
    own = channel(layout(num_blocks=3, block_size=16))
    own.connect("p", [each.endpoint for each in ranks])
    own.transfer(plan(dst=(2,), first_token=1, num_tokens=10))
    for number, tensor in enumerate(own.region.tensors):
        parts = [tokens(each.content()[number], (5, 2, 7), 1, 10) for each in ranks]
        assert torch.equal(tokens(tensor, (2,), 1, 10), torch.cat(parts, dim=2))
    whole = owner(layout(heads=4, width=16))
    half = channel(layout(heads=2, width=16, rank=1, ranks=2))
    half.connect("p", [whole.endpoint])
    half.transfer(plan())
    for tensor, expected in zip(half.region.tensors, whole.content(), strict=True):
        assert torch.equal(tensor[:, [1, 0, 3]], expected[:, [5, 2, 7], :, 2:])


@pytest.mark.slow
def test_checksums_of_the_owner(owner, channel):
    of = layout()
    theirs, own = owner(of), channel(of)
    twin = channel(of, seed=1)  # the owner's content
    own.connect("p", [theirs.endpoint])
    right = twin.checksums((5, 2, 7))
    own.transfer(plan(checksums=(right,)))
    with pytest.raises(TransferError, match=r"\[2\]"):
        own.transfer(plan("wrong", checksums=((right[0], right[1] ^ 1, right[2]),)))


@pytest.mark.slow
def test_several_transfers_at_once(owner, channel):
    of = layout(num_blocks=64, block_size=16, layers=4, heads=4, width=64)
    theirs, own = owner(of), channel(of, max_running=3)
    own.connect("p", [theirs.endpoint])

    def run(number):
        blocks = tuple(range(number * 8, number * 8 + 8))
        own.transfer(plan(str(number), src=blocks, dst=blocks, num_tokens=128))

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(run, range(8)))
    for tensor, expected in zip(own.region.tensors, theirs.content(), strict=True):
        assert torch.equal(tensor, expected)


def in_its_middle(own, act):
    """A thread that acts 0.3 s after a transfer has begun."""
    def wait():
        until = time.monotonic() + 20
        while not own.report()["running"] and time.monotonic() < until:
            time.sleep(0.01)
        time.sleep(0.3)
        act()

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


@pytest.mark.slow
@pytest.mark.parametrize("end", ["deadline", "cancel", "close"])
def test_a_peer_that_stands_still(owner, channel, end):
    """Nothing is written after the end, also when the peer goes on; and then the same link works."""
    of = layout(num_blocks=16, block_size=64, layers=4, heads=4, width=64)
    theirs, own = owner(of), channel(of)
    own.connect("p", [theirs.endpoint])
    blocks = tuple(range(16))
    everything = dict(src=blocks, dst=blocks, num_tokens=64 * 16)
    own.transfer(plan(**everything))  # connections are made; what comes next needs no greeting
    for tensor in own.region.tensors:
        tensor.zero_()
    theirs.stop()
    if end != "deadline":
        timer = in_its_middle(own, {"cancel": lambda: own.cancel("t"), "close": own.close}[end])
    error = TransferTimeoutError if end == "deadline" else TransferCancelled
    begun = time.monotonic()
    with pytest.raises(error):
        own.transfer(plan(timeout_s=0.3 if end == "deadline" else 30, **everything))
    assert time.monotonic() - begun < 20
    if end != "deadline":
        timer.join()
    for tensor in own.region.tensors:
        tensor.zero_()
    theirs.go_on()
    if end == "close":
        time.sleep(0.3)  # for what must not happen
        assert not written(own)
        return
    wait_until("the transfer that was given up", lambda: own._staging.num_stray == 0)
    assert not written(own)
    own.transfer(plan("again", **everything))
    for tensor, expected in zip(own.region.tensors, theirs.content(), strict=True):
        assert torch.equal(tensor, expected)


@pytest.mark.slow
@pytest.mark.parametrize("when", ["before", "during"])
def test_the_owner_is_killed(owner, channel, when):
    of = layout(num_blocks=16, block_size=64, layers=4, heads=4, width=64)
    theirs, own = owner(of), channel(of)
    own.connect("p", [theirs.endpoint])
    if when == "during":
        theirs.stop()
        timer = in_its_middle(own, theirs.kill)
    else:
        theirs.kill()
    begun = time.monotonic()
    with pytest.raises(TransferError, match=r"gone|refuses") as found:
        own.transfer(plan(src=tuple(range(16)), dst=tuple(range(16)), num_tokens=1024))
    assert not isinstance(found.value, TransferTimeoutError)
    assert time.monotonic() - begun < 20
    if when == "during":
        timer.join()
    # Another owner of the same name serves; what was read of the first one is no more.
    other = owner(of, seed=2)
    own.connect("p", [other.endpoint])
    own.transfer(plan("again", num_tokens=192))
    assert torch.equal(own.region.tensors[0][:, 1], other.content()[0][:, 5])
    wait_until("the transfers of the first owner", lambda: own._staging.num_stray == 0)  # the library tries for a while


def test_who_may_not_take_part(owner, channel):
    theirs = owner(layout())
    stranger = channel(layout(), key=b"another key than theirs")
    with pytest.raises(TransferError, match="another key"):
        stranger.connect("p", [theirs.endpoint])
    own = channel(layout())
    bases = [theirs.endpoint.address["bases"][0] + 4096, *theirs.endpoint.address["bases"][1:]]
    forged = theirs.endpoint.model_copy(update={"address": {**theirs.endpoint.address, "bases": bases}})
    with pytest.raises(TransferError, match="another key"):
        own.connect("p", [forged])
    with pytest.raises(TransferError, match="unknown"):
        own.transfer(plan())
    theirs.kill()
    with pytest.raises(TransferError, match=r"peer p: .*(gone|refuses)"):
        own.connect("p", [theirs.endpoint], timeout_s=20)


@pytest.mark.slow
def test_connecting_to_one_who_stands_still(owner, channel):
    """It does not hold up others."""
    still, other, own = owner(layout()), owner(layout(), seed=2), channel(layout())
    own.connect("other", [other.endpoint])
    still.stop()
    with pytest.raises(TransferTimeoutError):
        own.connect("p", [still.endpoint], timeout_s=0.5)
    own.transfer(plan(source="other", timeout_s=5))
    still.go_on()
    own.connect("p", [still.endpoint])
    own.transfer(plan("again"))
    assert torch.equal(own.region.tensors[0][:, 1], still.content()[0][:, 5])


def test_it_is_reached_from_this_machine_only(channel):
    before = set(os.listdir("/proc/self/fd"))
    channel(layout())
    found = 0
    for fd in set(os.listdir("/proc/self/fd")) - before:
        try:
            with socket.socket(fileno=os.dup(int(fd))) as each:
                if not each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) or each.family == socket.AF_UNIX:
                    continue
                name = each.getsockname()[0]
                device = each.getsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, 16).rstrip(b"\0")
        except OSError:
            continue
        found += 1
        assert device == b"lo" or name == "127.0.0.1", name
        assert not os.get_inheritable(int(fd))
    assert found >= 1


def test_nixl_within_a_host_takes_no_sockets():
    """As UCX chooses: it reads the owner's memory itself, which may stand still."""
    if missing := find_channel("nixl").missing():
        pytest.skip(missing)
    theirs = OwnerProcess("nixl", layout())
    try:
        with make_channel("nixl", region("nixl", layout()), TransferOptions(key=KEY)) as own:
            own.connect("p", [theirs.endpoint])
            own.transfer(plan())
            theirs.stop()
            own.transfer(plan("again"))
            assert torch.equal(own.region.tensors[0][:, 1], theirs.content()[0][:, 5])
    finally:
        theirs.close()


@pytest.mark.parametrize(
    ("name", "modules", "words"),
    [("mooncake", ["mooncake", "mooncake.engine"], "pip install mooncake-transfer-engine"),
     ("nixl", [f"{each}{end}" for each in MODULES for end in ("", "._api")], "pip install nixl-cu12")],
)  # fmt: skip
def test_without_the_library(monkeypatch, name, modules, words):
    for each in modules:
        monkeypatch.setitem(sys.modules, each, None)
    assert words in find_channel(name).missing()
    with pytest.raises(TransferError, match=f"{name} cannot work here: it needs .*{words}"):
        make_channel(name, region(name, layout()), TransferOptions(key=KEY))


def test_mooncake_without_the_system_library(monkeypatch, tmp_path):
    """On a machine without libibverbs1, the message names the package to install."""
    folder = tmp_path / "mooncake"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "engine.py").write_text("raise ImportError('libibverbs.so.1: cannot open shared object file')")
    monkeypatch.syspath_prepend(tmp_path)
    for each in ("mooncake", "mooncake.engine"):
        monkeypatch.delitem(sys.modules, each, raising=False)
    assert "apt install libibverbs1" in find_channel("mooncake").missing()
    for each in ("mooncake", "mooncake.engine"):
        sys.modules.pop(each, None)
