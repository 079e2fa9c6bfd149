"""Nodes of a prompt and of decoding, in a word."""

from collections.abc import Iterable
from typing import Any

from sagellm.scheduler_ir.graph import IRGraph
from sagellm.scheduler_ir.nodes import IRNode, NodeType
from tests.scheduler_ir.made import node


def ids(graph: Iterable[IRNode]) -> list[str]:
    return [each.node_id for each in graph]


def fetch(request: int, tokens: int, **more: Any) -> IRNode:
    return node(f"f{request}", NodeType.PREFIX_FETCH, "", f"kv:{request}:{tokens}", request=request, tokens=tokens, **more)


def load(request: int, start: int, end: int, inputs: str | None = None, bytes: int = 0, **more: Any) -> IRNode:
    inputs = (f"kv:{request}:{start}" if start else "") if inputs is None else inputs
    return node(f"l{request}.{start}", NodeType.KV_LOAD, inputs, f"kv:{request}:{end}", request=request, start=start,
                tokens=end - start, src_tier="cpu", dst_tier="gpu", bytes=bytes, **more)  # fmt: skip


def prefill(request: int, start: int, end: int, last: bool = False, inputs: str | None = None, **more: Any) -> IRNode:
    inputs = (f"kv:{request}:{start}" if start else "") if inputs is None else inputs
    outputs = f"kv:{request}:{end}" + (f" logits:{request}:{end}" if last else "")
    return node(f"p{request}.{start}", NodeType.PREFILL_CHUNK, inputs, outputs,
                request=request, start=start, tokens=end - start, **more)  # fmt: skip


def decode(request: int, place: int, inputs: str | None = None, **more: Any) -> IRNode:
    inputs = f"kv:{request}:{place - 1} token:{request}:{place - 1}" if inputs is None else inputs
    outputs = f"kv:{request}:{place} logits:{request}:{place}"
    return node(f"d{request}.{place}", NodeType.DECODE_STEP, inputs, outputs, requests=[request], **more)


def sample(request: int, place: int, **more: Any) -> IRNode:
    name = f"{request}:{place}"
    return node(f"s{request}.{place}", NodeType.SAMPLE, f"logits:{name}", f"token:{name}", requests=[request], **more)


def collective(name: str, inputs: str = "", bytes: int = 8, op: str = "all_reduce", group: str = "tp", **more: Any) -> IRNode:
    return node(name, NodeType.COLLECTIVE, inputs, f"{name}!", op=op, group=group, bytes=bytes, **more)


def graph(*nodes: IRNode) -> IRGraph:
    return IRGraph(nodes)
