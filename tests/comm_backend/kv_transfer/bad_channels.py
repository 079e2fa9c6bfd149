"""KV channels that break the contract, each in one way. `BREAKS`: the rule that must say so, and the scenario that shows it."""

import threading
import time

from sagellm.comm_backend.kv_transfer.conversion import Conversion
from sagellm.comm_backend.kv_transfer.shm import ShmChannel
from sagellm.comm_backend.kv_transfer.tcp import TcpChannel
from sagellm.comm_backend.kv_transfer.turns import Turns
from sagellm.core.errors import TransferCancelled, TransferError, TransferTimeoutError


class Unbuilt(ShmChannel):
    def _open(self):
        raise RuntimeError("no")


class AnyOption(ShmChannel):
    def __init__(self, region, options):
        super().__init__(region, options.model_copy(update={"options": {}}))


class CountsNothing(ShmChannel):
    def report(self):
        return {name: value if isinstance(value, str) else 0 for name, value in super().report().items()}


class NextBlock(ShmChannel):
    def transfer(self, plan):
        return super().transfer(plan.model_copy(update={"block_ids": tuple((b + 1) % 12 for b in plan.block_ids)}))


class WholeBlocks(ShmChannel):
    """Copies what lies behind the tokens in their last block, too."""

    def transfer(self, plan):
        size = self.region.layout.block_size
        end = plan.first_token + plan.num_tokens
        more = min(-(end - plan.target_start) % size, plan.source_start + len(plan.block_ids) * size - end)
        result = super().transfer(plan.model_copy(update={"num_tokens": plan.num_tokens + more}))
        return result._replace(num_bytes=plan.num_tokens * self.region.layout.token_bytes())

    def report(self):
        return {**super().report(), "bytes": 0}


class FirstHeads(ShmChannel):
    """Takes the first heads of a rank, whichever are wanted."""

    def connect(self, peer, endpoints, *, timeout_s=10.0):
        super().connect(peer, endpoints, timeout_s=timeout_s)
        conversions = self._peers[peer].conversions
        for rank, right in conversions.items():
            conversions[rank] = Conversion(right.own, right.peer, [run._replace(src_head=0) for run in right.runs])


class AnyLayout(ShmChannel):
    def connect(self, peer, endpoints, *, timeout_s=10.0):
        own = self.region.layout
        if len(endpoints) == 1 and endpoints[0].layout.block_size == own.block_size:
            endpoints = [endpoints[0].model_copy(update={"layout": own})]
        super().connect(peer, endpoints, timeout_s=timeout_s)


class BelievesAddresses(ShmChannel):
    def connect(self, peer, endpoints, *, timeout_s=10.0):
        if endpoints and not endpoints[0].address:
            return
        super().connect(peer, endpoints, timeout_s=timeout_s)


class AnyKey(TcpChannel):
    def __init__(self, region, options):
        super().__init__(region, options.model_copy(update={"key": b"this one, for all of them"}))


class AnyBlock(ShmChannel):
    def _check_plan(self, plan, peer):
        if -1 not in plan.target_blocks:
            super()._check_plan(plan, peer)


class NeverForgets(ShmChannel):
    def disconnect(self, peer):
        pass


class SwallowsChecksums(ShmChannel):
    def transfer(self, plan):
        return super().transfer(plan.model_copy(update={"checksums": ()}) if len(plan.block_ids) == 2 else plan)


class OtherChecksums(ShmChannel):
    def checksums(self, blocks):
        return tuple(value ^ 0xFFFF for value in super().checksums(blocks))


class Stale(ShmChannel):
    """Reads the peer's memory once."""

    def _connect(self, endpoint, deadline):
        link = super()._connect(endpoint, deadline)
        self._kept = tuple(part.copy() for part in link.parts)
        return link._replace(parts=self._kept)


class NoDeadline(ShmChannel):
    def transfer(self, plan):
        return super().transfer(plan.model_copy(update={"timeout_s": 60.0}))


class WritesAfterwards(ShmChannel):
    """Gives up in time, and leaves the copying to a thread."""

    def transfer(self, plan):
        if plan.timeout_s > 0.01:
            return super().transfer(plan)
        again = plan.model_copy(update={"timeout_s": 60.0})
        threading.Timer(0.15, lambda: super(WritesAfterwards, self).transfer(again)).start()
        raise TransferTimeoutError("late")


class IgnoresCancel(ShmChannel):
    def cancel(self, transfer_id):
        return transfer_id == "t"


class AllAtOnce(ShmChannel):
    def __init__(self, region, options):
        super().__init__(region, options)
        self._turns = Turns(99)

    def _read_tokens(self, link, conversion, tokens, run):
        time.sleep(0.02)
        super()._read_tokens(link, conversion, tokens, run)


class OpenForEver(ShmChannel):
    def close(self):
        self._turns._stop(lambda run: True, TransferCancelled("closed"))


class DeafToClose(ShmChannel):
    def _close(self):
        pass


class DeafToDeath(ShmChannel):
    def _connect(self, endpoint, deadline):
        link = super()._connect(endpoint, deadline)
        link.owner.is_alive = lambda: True
        return link


class NeverAgain(ShmChannel):
    def connect(self, peer, endpoints, *, timeout_s=10.0):
        if peer in self._peers:
            raise TransferError("is connected")
        super().connect(peer, endpoints, timeout_s=timeout_s)


class WaitsForStalled(TcpChannel):
    def transfer(self, plan):
        return super().transfer(plan.model_copy(update={"timeout_s": 3.0}) if plan.timeout_s == 0.4 else plan)


class Hangs(ShmChannel):
    def _open(self):
        while True:
            time.sleep(1)


BREAKS = {
    Unbuilt: ("builds", "starting"),
    AnyOption: ("options", "starting"),
    CountsNothing: ("report", "copies"),
    NextBlock: ("copies", "copies"),
    WholeBlocks: ("nothing_else", "copies"),
    FirstHeads: ("converts", "conversions"),
    AnyLayout: ("layout", "layouts"),
    BelievesAddresses: ("address", "layouts"),
    AnyKey: ("key", "layouts"),
    AnyBlock: ("misuse", "misuse"),
    NeverForgets: ("disconnect", "misuse"),
    SwallowsChecksums: ("checksums", "checksums"),
    OtherChecksums: ("checksums", "checksums"),
    Stale: ("fresh", "fresh_bytes"),
    NoDeadline: ("deadline", "deadlines"),
    WritesAfterwards: ("after_end", "deadlines"),
    IgnoresCancel: ("cancel", "cancelling"),
    AllAtOnce: ("turns", "turns"),
    OpenForEver: ("closed", "closing"),
    DeafToClose: ("peer_closed", "closing"),
    DeafToDeath: ("peer_killed", "killing"),
    NeverAgain: ("comes_back", "killing"),
    WaitsForStalled: ("stalled", "stalling"),
    Hangs: ("ends", "starting"),
}
