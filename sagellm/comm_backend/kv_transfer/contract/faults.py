"""Scenarios of failures, which must come in time and with a message: deadlines, cancellation, owners that close, stand
still or are killed."""

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from sagellm.comm_backend.kv_transfer.base import KVTransferChannel, TransferPlan
from sagellm.comm_backend.kv_transfer.contract.desk import FINE_S, Desk, layout_of
from sagellm.comm_backend.kv_transfer.contract.owner import OwnerProcess
from sagellm.comm_backend.kv_transfer.layout import KVLayout, KVPart
from sagellm.core.errors import TransferCancelled, TransferError, TransferTimeoutError

__all__ = ["cancelling", "closing", "deadlines", "killing", "stalling", "turns"]

SOON_S = 0.3  # for what an ended transfer might still write
TRIES = 20


def _large() -> KVLayout:
    """64 MiB: some milliseconds for any copy."""
    parts = tuple(KVPart(name=name, num_heads=4, width=64, dtype="bfloat16") for name in ("keys", "values"))
    return layout_of(num_blocks=128, block_size=64, num_layers=8, parts=parts)


def _all_blocks(desk: Desk, layout: KVLayout, **values: Any) -> TransferPlan:
    blocks = range(layout.num_blocks)
    return desk.plan(blocks, blocks, layout.num_blocks * layout.block_size, **values)


def _begun(desk: Desk) -> tuple[KVTransferChannel, OwnerProcess, "_Transfer"]:
    """A large transfer that is under way."""
    channel, owner = desk.pair(layout := _large())
    running = _Transfer(channel, _all_blocks(desk, layout), again=True)
    while not running.is_over and not channel.report()["running"]:
        pass
    return channel, owner, running


def _stays(desk: Desk, channel: KVTransferChannel, what: str) -> None:
    """Nothing is written to own blocks any more."""
    before = channel.checksums(range(channel.region.layout.num_blocks))
    time.sleep(SOON_S)
    desk.seen.add("after_end")
    if channel.checksums(range(channel.region.layout.num_blocks)) != before:
        desk.report("after_end", f"own blocks were written after {what}.")


class _Transfer:
    """One in a thread of its own."""

    def __init__(self, channel: KVTransferChannel, plan: TransferPlan, again: bool = False) -> None:
        self.error: BaseException | None = None
        self._again = again
        self._thread = threading.Thread(target=self._run, args=(channel, plan), daemon=True)
        self._thread.start()

    def _run(self, channel: KVTransferChannel, plan: TransferPlan) -> None:
        try:
            channel.transfer(plan)
            while self._again:
                channel.transfer(plan)
        except BaseException as error:
            self.error = error

    @property
    def is_over(self) -> bool:
        return not self._thread.is_alive()

    def end(self, within_s: float) -> bool:
        """Whether it has ended by then; it begins no other."""
        self._again = False
        self._thread.join(within_s)
        return self.is_over


def deadlines(desk: Desk) -> None:
    """Too short ones; afterwards all goes on."""
    layout = _large()
    channel, _ = desk.pair(layout)
    for timeout_s in (1e-3, 1e-6):
        plan = _all_blocks(desk, layout, timeout_s=timeout_s)
        what = f"64 MiB within {timeout_s * 1e3:g} ms"
        desk.refused("deadline", what, partial(channel.transfer, plan), TransferTimeoutError, within_s=timeout_s)
        _stays(desk, channel, "the deadline")
    with desk.held("deadline"):
        channel.transfer(_all_blocks(desk, layout))


def cancelling(desk: Desk) -> None:
    layout = _large()
    channel, _ = desk.pair(layout)
    with desk.held("cancel"):
        if channel.cancel("unknown"):
            desk.report("cancel", "cancel of an unknown transfer returned True.")
    for _ in range(TRIES):
        running = _Transfer(channel, _all_blocks(desk, layout))
        while not running.is_over and not channel.report()["running"]:
            pass
        was_there = channel.cancel("t")
        if not running.end(FINE_S):
            desk.report("cancel", "a transfer that was cancelled did not end.")
            return
        if was_there and isinstance(running.error, TransferCancelled):
            break
        if running.error is not None:
            desk.report("cancel", f"a transfer that was cancelled raised {type(running.error).__name__}: {running.error}")
            return
    else:
        desk.report("cancel", f"{TRIES} transfers were cancelled, and none raised TransferCancelled.")
        return
    _stays(desk, channel, "it was cancelled")
    with desk.held("cancel"):
        channel.transfer(_all_blocks(desk, layout))


def turns(desk: Desk) -> None:
    """Eight at once where two may run; all come to their end and to what is theirs."""
    layout = layout_of(num_blocks=64, block_size=64)
    channel, _ = desk.pair(layout, max_running=2)
    most = 0
    desk.seen.add("turns")
    for _ in range(5):
        plans = [
            desk.plan(range(n * 8, n * 8 + 8), range(56 - n * 8, 64 - n * 8), 512, transfer_id=f"t{n}") for n in range(8)
        ]  # fmt: skip
        for tensor in channel.region.tensors:
            tensor.zero_()
        transfers = [_Transfer(channel, plan) for plan in plans]
        deadline = time.monotonic() + FINE_S
        while not all(each.is_over for each in transfers) and time.monotonic() < deadline:
            most = max(most, channel.report()["running"])
        if errors := [each.error for each in transfers if each.error is not None or not each.is_over]:
            desk.report("turns", f"of eight transfers at once {len(errors)} failed: {errors[0]!r}.")
            return
        blocks = ([block for plan in plans for block in getattr(plan, side)] for side in ("block_ids", "target_blocks"))
        desk.expect_tokens("turns", channel, desk.plan(*blocks, 64 * 64), layout, 1, "eight transfers at once")
    if most > 2:
        desk.report("turns", f"{most} transfers ran at once; max_running is 2.")


def closing(desk: Desk) -> None:
    layout = layout_of()
    channel, owner = desk.pair(layout)
    with desk.held("peer_closed"):
        channel.transfer(desk.plan([1], [1], 4))
        owner.close_channel()
    plan = desk.plan([1], [2], 4, timeout_s=FINE_S)
    desk.refused("peer_closed", "transfer from a peer that has closed", partial(channel.transfer, plan), within_s=1)
    channel, owner, running = _begun(desk)
    with desk.held("closed"):
        channel.close()
        channel.close()
    if not running.end(FINE_S) or not isinstance(running.error, TransferError):
        desk.report("closed", f"a transfer that ran when it was closed ended with {running.error!r}.")
    calls: dict[str, Callable[[], Any]] = {
        "transfer": lambda: channel.transfer(desk.plan([1], [2], 4)),
        "connect": lambda: channel.connect("p", [owner.endpoint]),
        "checksums": lambda: channel.checksums([1]),
    }
    for what, call in calls.items():
        desk.refused("closed", f"{what} after close", call)


def killing(desk: Desk) -> None:
    """Before, between and during transfers; and back again."""
    layout = layout_of()
    channel, owner = desk.pair(layout)
    with desk.held("peer_killed"):
        channel.transfer(desk.plan([1], [1], 4))
    owner.kill()
    plan = desk.plan([1], [2], 4)
    desk.refused("peer_killed", "transfer from a peer that was killed", partial(channel.transfer, plan), within_s=1)
    again = partial(channel.connect, "p", [owner.endpoint], timeout_s=FINE_S)
    desk.refused("peer_killed", "connect to a peer that was killed", again, within_s=FINE_S)
    with desk.held("comes_back"):
        other = desk.owner(layout, seed=2)
        channel.connect("p", [other.endpoint], timeout_s=FINE_S)
        for tensor in channel.region.tensors:
            tensor.zero_()
        plan = desk.plan([1, 2], [3, 4], 8)
        channel.transfer(plan)
    desk.expect_tokens("comes_back", channel, plan, layout, 2, "from a peer that has come back")
    channel, owner, running = _begun(desk)
    owner.kill()
    start = time.monotonic()
    while not running.is_over and time.monotonic() - start < FINE_S / 4:
        time.sleep(0.01)
    if not running.is_over:
        desk.report("peer_killed", f"a peer was killed {FINE_S / 4:g} s ago, and transfers from it go on.")
    elif not isinstance(running.error, TransferError) or isinstance(running.error, TransferTimeoutError):
        desk.report("peer_killed", f"a transfer whose peer was killed raised {running.error!r}; raise TransferError.")
    running.end(0)
    _stays(desk, channel, "its peer was killed")


def stalling(desk: Desk) -> None:
    """A peer that stands still: done without it, or not in time."""
    layout = _large()
    channel, owner = desk.pair(layout)
    owner.stop()
    desk.seen.add("stalled")
    start, error = time.monotonic(), None
    try:
        channel.transfer(_all_blocks(desk, layout, timeout_s=0.4))
    except Exception as raised:
        error = raised
    taken_s = time.monotonic() - start
    if error is not None and not isinstance(error, TransferTimeoutError):
        desk.report("stalled", f"a transfer from a peer that stands still raised {error!r}; raise TransferTimeoutError.")
    if taken_s > 2.4:
        desk.report("stalled", f"a transfer from a peer that stands still took {taken_s:.1f} s; its deadline was 0.4 s.")
    owner.go_on()
    if error is not None:
        _stays(desk, channel, "the deadline of a transfer from a peer that stood still")
    with desk.held("stalled"):
        channel.transfer(_all_blocks(desk, layout))
