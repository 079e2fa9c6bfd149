"""Checks of what no pass may change, used by tests and `IRGraph.optimize(check=True)`.

1. No cycle.
2. Every value that was given is given, except for unused keys and values in the middle of a request.
3. No node takes a value from outside that was not taken from outside before.
4. Every token of a prompt that was computed or fetched still is; none that was not is computed now, none twice that was not. So
   one that is no longer computed is given by a fetch, a load or a transfer.
5. Fetches, loads, stores and transfers move what they moved. Decode steps, verifications and samples are for the same requests
   as often as before. Collectives of an op and group have the same bytes in sum.
6. Every logits and token value rests on at least what it rested on: the other such values, and the keys and values of tokens.
"""

from collections import Counter, defaultdict
from typing import Any

from sagellm.core.errors import PlanError
from sagellm.scheduler_ir.graph import IRGraph
from sagellm.scheduler_ir.kinds import FETCHES
from sagellm.scheduler_ir.nodes import IRNode, NodeType

__all__ = ["check_same_work"]

MOVES = (*FETCHES, NodeType.KV_STORE)
Spans = dict[int, int]  # request -> bits of its tokens


def check_same_work(before: IRGraph, after: IRGraph, by: str = "the pass") -> None:
    """Raises PlanError, naming `by` and the first rule that is broken. O(nodes x (values + requests)): not for every step."""
    after.topological_order()
    for rule in (_values, _prompts, _counts, _rests):  # a rule may rely on those before it
        if broken := rule(before, after):
            raise PlanError(f"{by} changed what is computed: {broken}.")


def _values(before: IRGraph, after: IRGraph) -> str:
    taken = {name for node in after for name in node.inputs} | _results(before)
    for node in before:
        for name in node.outputs:
            if after.giver(name) is None and (name in taken or not name.startswith("kv:")):
                return f"{name}, which {node.node_id} gave, is given no longer"
    outside = {name for node in before for name in node.inputs if before.giver(name) is None}
    for node in after:
        for name in node.inputs:
            if after.giver(name) is None and name not in outside:
                return f"{node.node_id} takes {name}, which no node gives"
    return ""


def _results(graph: IRGraph) -> set[str]:
    taken = {name for node in graph for name in node.inputs}
    return {name for node in graph for name in node.outputs if name not in taken}


def _prompts(before: IRGraph, after: IRGraph) -> str:
    computed, twice, fetched = _spans(before)
    computed_now, twice_now, fetched_now = _spans(after)
    for name in computed.keys() | fetched.keys() | computed_now.keys() | fetched_now.keys():
        old, new = computed[name], computed_now[name]
        if lost := (old | fetched[name]) & ~(new | fetched_now[name]):
            return f"token {_lowest(lost)} of request {name} is neither computed nor fetched"
        if more := new & ~old:
            return f"token {_lowest(more)} of request {name} is computed, which it was not"
        if again := twice_now[name] & ~twice[name]:
            return f"token {_lowest(again)} of request {name} is computed twice"
    return ""


def _spans(graph: IRGraph) -> tuple[Spans, Spans, Spans]:
    """Tokens that prefills compute, those that they compute twice, and those that are fetched."""
    computed, twice, fetched = defaultdict(int), defaultdict(int), defaultdict(int)
    for node in graph:
        if node.node_type is NodeType.PREFILL_CHUNK:
            name, span = node.config["request"], _span(node)
            twice[name] |= computed[name] & span
            computed[name] |= span
        elif node.node_type in FETCHES:
            fetched[node.config["request"]] |= _span(node)
    return computed, twice, fetched


def _span(node: IRNode) -> int:
    return ((1 << node.config["tokens"]) - 1) << node.config.get("start", 0)


def _lowest(span: int) -> int:
    return (span & -span).bit_length() - 1


def _counts(before: IRGraph, after: IRGraph) -> str:
    old, new = _work(before), _work(after)
    for what in old | new:
        if old[what] != new[what]:
            return f"{' '.join(map(str, what))}: {old[what]} before, {new[what]} after"
    return ""


def _work(graph: IRGraph) -> Counter[tuple[Any, ...]]:
    work: Counter[tuple[Any, ...]] = Counter()
    for node in graph:
        kind, config = node.node_type, node.config
        if kind in MOVES:
            parts = [f"{name} {config[name]}" for name in ("start", "tokens", "bytes") if name in config]
            ways = [value for name, value in config.items() if name.startswith(("src_", "dst_"))]
            work[(kind.value, "of request", config["request"], *parts, *ways)] += 1
        elif kind is NodeType.COLLECTIVE:
            work[("bytes of", config["op"], "in", config["group"])] += config["bytes"]
        elif kind is not NodeType.PREFILL_CHUNK:
            for request, draft in zip(config["requests"], config.get("drafts", config["requests"]), strict=False):
                drafts = (f"{draft} drafts",) if kind is NodeType.VERIFY else ()
                work[(kind.value, "of request", request, *drafts)] += 1
    return work


def _rests(before: IRGraph, after: IRGraph) -> str:
    now = _ground(after)
    for name, (values, tokens) in _ground(before).items():
        new_values, new_tokens = now[name]
        if lost := values - new_values:
            return f"{name} no longer rests on {min(lost)}"
        for request, span in tokens.items():
            if lost_tokens := span & ~new_tokens.get(request, 0):
                return f"{name} no longer rests on token {_lowest(lost_tokens)} of request {request}"
    return ""


def _ground(graph: IRGraph) -> dict[str, tuple[set[str], Spans]]:
    """Return for each value other than keys and values the values it depends on, and the prompts' tokens."""
    ground: dict[str, tuple[set[str], Spans]] = {}
    for node in graph.topological_order():
        values: set[str] = set()
        tokens: Spans = {}
        for name in node.inputs:
            values.update(() if name.startswith("kv:") else (name,))
            more_values, more_tokens = ground.get(name, (set(), {}))
            values |= more_values
            for request, span in more_tokens.items():
                tokens[request] = tokens.get(request, 0) | span
        if node.node_type in FETCHES or node.node_type is NodeType.PREFILL_CHUNK:
            request = node.config["request"]
            tokens[request] = tokens.get(request, 0) | _span(node)
        for name in node.outputs:
            ground[name] = (values, tokens)
    return {name: found for name, found in ground.items() if not name.startswith("kv:")}
