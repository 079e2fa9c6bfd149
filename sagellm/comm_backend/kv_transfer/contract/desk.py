"""Tools of a scenario: a channel to check, processes that own blocks, and a way to report broken rules."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch

from sagellm.comm_backend.contract.witness import Witness
from sagellm.comm_backend.kv_transfer.base import KVTransferChannel, TransferOptions, TransferPlan
from sagellm.comm_backend.kv_transfer.contract.owner import KEY, OwnerProcess, filled, make_region
from sagellm.comm_backend.kv_transfer.layout import KVLayout, KVPart
from sagellm.core.errors import TransferError

__all__ = ["Desk", "Facts", "Task", "layout_of"]

FINE_S = 20.0  # deadline of what is to succeed


class Task(NamedTuple):
    """One scenario."""

    kind: type[KVTransferChannel]
    options: dict[str, Any]
    seed: int


class Facts(NamedTuple):
    """Observations so far."""

    reports: list[tuple[str, str]]
    seen: set[str]
    num_operations: int


def layout_of(num_blocks: int = 12, block_size: int = 4, heads: tuple[int, int] = (0, 4), **values: Any) -> KVLayout:
    """`heads`: from and to. A layout of 4 heads in all; keys and values differ in width and dtype."""
    parts = (("keys", 8, "bfloat16"), ("values", 8, "bfloat16"), ("scales", 3, "float32"))
    defaults = {
        "num_layers": 3, "total_heads": 4,
        "parts": tuple(
            KVPart(name=name, num_heads=heads[1] - heads[0], width=width, dtype=dtype) for name, width, dtype in parts
        ),
    }  # fmt: skip
    return KVLayout(num_blocks=num_blocks, block_size=block_size, first_head=heads[0], **(defaults | values))


class Desk(Witness):
    """One scenario's."""

    refusal = TransferError

    def __init__(self, task: Task, starter: Connection) -> None:
        super().__init__()
        self.kind, self.seed, self._starter = task.kind, task.seed, starter
        self._options = task.options
        self._owners: list[OwnerProcess] = []
        self._channels: list[KVTransferChannel] = []

    def channel(self, layout: KVLayout, *, key: bytes = KEY, max_running: int = 4, **options: Any) -> KVTransferChannel:
        """With blocks of zeros."""
        given = TransferOptions(key=key, max_running=max_running, options=self._options | options)
        channel = self.kind(make_region(self.kind, layout, None), given)
        self._channels.append(channel)
        return channel

    def owner(self, layout: KVLayout, seed: int = 1, key: bytes = KEY) -> OwnerProcess:
        owner = OwnerProcess(self._starter, self.kind, layout, seed, self._options, key)
        self._owners.append(owner)
        return owner

    def pair(self, layout: KVLayout, **values: Any) -> tuple[KVTransferChannel, OwnerProcess]:
        """A channel that is connected to an owner of the same layout, its peer `p`."""
        with self.held("builds"):
            channel, owner = self.channel(layout, **values), self.owner(layout)
            channel.connect("p", [owner.endpoint], timeout_s=FINE_S)
        return channel, owner

    def plan(self, src: Sequence[int], dst: Sequence[int], num_tokens: int, **values: Any) -> TransferPlan:
        values = {"transfer_id": "t", "source": "p", "timeout_s": FINE_S} | values
        return TransferPlan(block_ids=tuple(src), target_blocks=tuple(dst), num_tokens=num_tokens, **values)

    def expect_tokens(
        self, rule: str, channel: KVTransferChannel, plan: TransferPlan, source: KVLayout, seed: int, what: str
    ) -> None:
        """Own blocks hold zeros but for the plan's tokens, each of which is what the peer's layout, filled so, has."""
        self.seen |= {rule, "nothing_else"}
        own = channel.region.layout
        whole = source.model_copy(update={
            "first_head": 0, "parts": tuple(part.model_copy(update={"num_heads": source.total_heads}) for part in source.parts)
        })  # fmt: skip
        tensors = zip(own.parts, channel.region.tensors, filled(whole, seed), strict=True)
        for part, tensor, theirs in tensors:
            expected = torch.zeros_like(tensor).view(torch.uint8)
            mine = theirs[:, :, :, own.first_head : own.first_head + part.num_heads]
            wanted = torch.zeros(expected.shape[1:3], dtype=torch.bool)
            for token in range(plan.first_token, plan.first_token + plan.num_tokens):
                src, dst = token - plan.source_start, token - plan.target_start
                place = plan.target_blocks[dst // own.block_size], dst % own.block_size
                from_block = plan.block_ids[src // source.block_size]
                expected[:, place[0], place[1]] = mine[:, from_block, src % source.block_size]
                wanted[place] = True
            is_other = (tensor.view(torch.uint8) != expected).flatten(3).any(-1).any(0)
            if bool((is_other & wanted).any()):
                where = (is_other & wanted).nonzero()[0].tolist()
                self.report(rule, f"{what}: {part.name} of block {where[0]}, token {where[1]} of it, are not the peer's.")
            if bool((is_other & ~wanted).any()):
                where = (is_other & ~wanted).nonzero()[0].tolist()
                self.report("nothing_else", f"{what}: {part.name} of block {where[0]}, token {where[1]} of it, were written.")

    def close(self) -> Facts:
        for channel in self._channels:
            with suppress(Exception):
                channel.close()
        for owner in self._owners:
            with suppress(Exception):
                owner.kill()
        return Facts(self.reports, self.seen, self.num_operations)


def run_desk(task: Task, play: Callable[[Desk], None], starter: Connection) -> Facts:
    """`starter`: pipe of an `OwnerStarter`."""
    return Desk(task, starter).play(play).close()
