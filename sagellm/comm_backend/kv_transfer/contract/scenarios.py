"""Scenarios of success, and of misuse that is rejected."""

import zlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from sagellm.comm_backend.kv_transfer.base import TransferEndpoint
from sagellm.comm_backend.kv_transfer.contract.desk import FINE_S, Desk, layout_of
from sagellm.comm_backend.kv_transfer.contract.owner import filled
from sagellm.comm_backend.kv_transfer.layout import KVPart

__all__ = ["checksums", "conversions", "copies", "fresh_bytes", "layouts", "misuse", "starting"]


def starting(desk: Desk) -> None:
    with desk.held("builds"):
        channel = desk.channel(layout_of())
        endpoint = channel.endpoint()
        told = TransferEndpoint.model_validate_json(endpoint.model_dump_json())
        if told != endpoint or told.channel != desk.kind.name or told.layout != layout_of():
            desk.report("builds", f"its endpoint is {endpoint!r}; as JSON it is the same, with its own name and layout.")
    desk.refused("options", "an option that no channel has", lambda: desk.channel(layout_of(), no_such_option=1))
    with desk.held("report"):
        report = channel.report()
        if not {"transfers", "bytes", "seconds", "waited_s", "running", "peers"} <= report.keys():
            desk.report("report", f"report() has {sorted(report)}.")


def copies(desk: Desk) -> None:
    """Random plans between equal layouts, of blocks in parts and as a whole."""
    random = torch.Generator().manual_seed(desk.seed)
    layout = layout_of()
    with desk.held("builds"):
        channel, owner = desk.channel(layout), desk.owner(layout)
    with desk.held("copies"):
        channel.connect("p", [owner.endpoint], timeout_s=FINE_S)
    num_bytes = 0
    for number in range(12):
        num = int(torch.randint(1, 8, (), generator=random))
        src, dst = (torch.randperm(12, generator=random)[:num].tolist() for _ in range(2))
        first = int(torch.randint(0, 4 * num, (), generator=random)) if number else 0
        num_tokens = int(torch.randint(1, 4 * num - first + 1, (), generator=random)) if number else 4 * num
        start = 8 if number % 3 == 2 else 0  # blocks that do not begin with the request
        sums = (owner.checksums(src),) if number % 2 else ()
        starts = {"first_token": first + start, "source_start": start, "target_start": start}
        plan = desk.plan(src, dst, num_tokens, **starts, checksums=sums)
        for tensor in channel.region.tensors:
            tensor.zero_()
        with desk.held("copies"):
            result = channel.transfer(plan)
        desk.expect_tokens("copies", channel, plan, layout, 1, f"{num_tokens} tokens from {first + start} on")
        if result.num_bytes != num_tokens * layout.token_bytes():
            desk.report("report", f"a result of {result.num_bytes} bytes; it were {num_tokens * layout.token_bytes()}.")
        num_bytes += num_tokens * layout.token_bytes()
    found = channel.report()
    if (found["transfers"], found["bytes"], found["running"], found["peers"]) != (12, num_bytes, 0, 1):
        desk.report("report", f"after 12 transfers of {num_bytes} bytes from a peer it is {found}.")


def conversions(desk: Desk) -> None:
    """Other block sizes and numbers, heads that are split, joined and held by several ranks."""
    split = [(0, 2), (2, 4)]
    cases: dict[str, tuple[Any, Any, list[tuple[int, int]]]] = {
        "smaller blocks": ({"block_size": 2, "num_blocks": 30}, (0, 4), [(0, 4)]),
        "larger blocks": ({"block_size": 6, "num_blocks": 5}, (0, 4), [(0, 4)]),
        "heads of two ranks joined": ({}, (0, 4), split),
        "half of the heads of one rank": ({}, (2, 4), [(0, 4)]),
        "heads of ranks that overlap, and other blocks": ({"block_size": 8, "num_blocks": 6}, (1, 3), split),
        "heads that several ranks hold": ({}, (0, 2), [(0, 2), (0, 2), (2, 4), (2, 4)]),
    }
    for what, (values, heads, ranks) in cases.items():
        layouts = [layout_of(heads=each, tp_rank=rank, tp_size=len(ranks)) for rank, each in enumerate(ranks)]
        size = 4 // (heads[1] - heads[0])
        own = layout_of(heads=heads, tp_size=size, tp_rank=heads[0] and size - 1, **values)
        with desk.held("builds"):
            channel, owners = desk.channel(own), [desk.owner(layout) for layout in layouts]
        connect = partial(channel.connect, "p", [owner.endpoint for owner in owners], timeout_s=FINE_S)
        if not desk.kind.converts:
            if what != "heads that several ranks hold":
                desk.refused("converts", f"connect to a peer with {what}", connect, within_s=FINE_S)
            continue
        with desk.held("converts"):
            connect()
        src, dst = [9, 2, 3, 11, 0], torch.randperm(own.num_blocks, generator=torch.Generator().manual_seed(5)).tolist()
        for is_checked in (False, True):
            sums = tuple(owner.checksums(src) for owner in owners) if is_checked else ()
            for tensor in channel.region.tensors:
                tensor.zero_()
            plan = desk.plan(src, dst[: -(-17 // own.block_size)], 14, first_token=3, checksums=sums)
            with desk.held("converts"):
                channel.transfer(plan)
            desk.expect_tokens("converts", channel, plan, layouts[0], 1, what)
        channel.close()


def layouts(desk: Desk) -> None:
    with desk.held("builds"):
        channel = desk.channel(layout_of())
        endpoint = desk.owner(layout_of()).endpoint
    parts = layout_of().parts
    changes: dict[str, tuple[dict[str, Any], str]] = {
        "other layers": ({"num_layers": 2}, "layers"),
        "other heads in all": ({"total_heads": 8}, "heads"),
        "other parts": ({"parts": parts[:2]}, "parts"),
        "another width": ({"parts": (KVPart(name="keys", num_heads=4, width=16, dtype="bfloat16"), *parts[1:])}, "width"),
        "another dtype": ({"parts": (KVPart(name="keys", num_heads=4, width=8, dtype="float16"), *parts[1:])}, "dtype"),
        "half of the heads": ({"parts": tuple(part.model_copy(update={"num_heads": 2}) for part in parts)}, "head 2"),
        "one rank of two": ({"tp_size": 2}, "rank"),
    }
    for what, (values, names) in changes.items():
        other = endpoint.model_copy(update={"layout": endpoint.layout.model_copy(update=values)})
        desk.refused("layout", f"connect to a peer with {what}", partial(_connect, channel, other), names=names, within_s=1)
    other = endpoint.model_copy(update={"channel": "carrier-pigeon"})
    desk.refused("layout", "connect to another channel", partial(_connect, channel, other), names="carrier-pigeon", within_s=1)
    desk.refused("layout", "connect to no rank", lambda: channel.connect("p", []), within_s=1)
    for what, address in {"no address": {}, "one of strings": dict.fromkeys(endpoint.address, "-1")}.items():
        other = endpoint.model_copy(update={"address": address})
        desk.refused("address", f"connect to {what}", partial(_connect, channel, other), within_s=FINE_S)
    with desk.held("layout"):
        channel.connect("p", [endpoint], timeout_s=FINE_S)
    if desk.kind.checks_key:
        stranger = desk.owner(layout_of(), key=b"quite another key of the same size")
        desk.refused("key", "connect with another key", partial(_connect, channel, stranger.endpoint), within_s=FINE_S)
    else:
        desk.seen.add("key")


def _connect(channel: Any, endpoint: TransferEndpoint) -> None:
    channel.connect("p", [endpoint], timeout_s=FINE_S)


def misuse(desk: Desk) -> None:
    channel, _ = desk.pair(layout_of())
    calls: dict[str, tuple[Callable[[], Any], str]] = {
        "an unknown peer": (lambda: channel.transfer(desk.plan([1], [1], 4, source="nobody")), "nobody"),
        "a block that the peer does not have": (lambda: channel.transfer(desk.plan([12], [1], 4)), "12"),
        "block -1 of the peer": (lambda: channel.transfer(desk.plan([-1], [1], 4)), "-1"),
        "a block that is not there": (lambda: channel.transfer(desk.plan([1], [99], 4)), "99"),
        "own block -1": (lambda: channel.transfer(desk.plan([1], [-1], 4)), "-1"),
        "too few blocks of the peer": (lambda: channel.transfer(desk.plan([1], [1, 2], 5)), ""),
        "too few own blocks": (lambda: channel.transfer(desk.plan([1, 2], [1], 5)), ""),
        "checksums of fewer blocks": (lambda: channel.transfer(desk.plan([1, 2], [1, 2], 5, checksums=((1,),))), "checksums"),
        "checksums of more ranks": (lambda: channel.transfer(desk.plan([1], [1], 4, checksums=((1,), (1,)))), "checksums"),
        "checksums of a block that is not there": (lambda: channel.checksums([12]), "12"),
    }
    for what, (call, names) in calls.items():
        desk.refused("misuse", what, call, names=names)
    if any(bool(tensor.view(torch.uint8).any()) for tensor in channel.region.tensors):
        desk.report("misuse", "something was written by plans that make no sense.")
    with desk.held("misuse"):
        channel.transfer(desk.plan([1], [1], 4))
    with desk.held("disconnect"):
        channel.disconnect("nobody")
        channel.disconnect("p")
    desk.refused("disconnect", "transfer from a peer that was disconnected", lambda: channel.transfer(desk.plan([1], [1], 4)))


def checksums(desk: Desk) -> None:
    layout = layout_of()
    channel, owner = desk.pair(layout)
    with desk.held("checksums"):
        found = owner.checksums([3, 7])
        right = []
        for block in (3, 7):
            right.append(zlib.crc32(b"".join(tensor[:, block].contiguous().numpy().tobytes() for tensor in filled(layout, 1))))
        if found != tuple(right):
            desk.report("checksums", f"of blocks 3 and 7 are {found}; CRC-32 over parts and layers is {right}.")
        channel.transfer(desk.plan([3, 7], [1, 2], 7, checksums=(found,)))
        if channel.checksums([1]) != found[:1]:
            desk.report("checksums", "a whole block has another checksum here than at its peer.")
    for what, sums, names in (
        ("of the first block are wrong", (found[0] ^ 1, found[1]), "[3]"),
        ("of the last block, of which a part is wanted, are wrong", (found[0], found[1] ^ 1), "[7]"),
    ):
        plan = desk.plan([3, 7], [1, 2], 7, checksums=(sums,))
        desk.refused("checksums", f"a transfer whose checksums {what}", partial(channel.transfer, plan), names=names)


def fresh_bytes(desk: Desk) -> None:
    """The owner's current bytes, however often it was read before."""
    layout = layout_of()
    channel, owner = desk.pair(layout)
    for seed in (1, 2, 3):
        with desk.held("fresh"):
            owner.fill(seed)
            plan = desk.plan([4, 5], [1, 2], 8)
            channel.transfer(plan)
        desk.expect_tokens("fresh", channel, plan, layout, seed, f"after the blocks were filled {seed} times")
