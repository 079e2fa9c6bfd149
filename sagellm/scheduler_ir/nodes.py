"""Nodes of a schedule: typed, with named values as inputs and outputs."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import Any

from sagellm.core.errors import PlanError

__all__ = ["IRNode", "NodeType", "kv_value", "logits_value", "token_value"]


class NodeType(str, Enum):
    """Work of a node. Behind each: what its `config` holds. Lengths in tokens, tiers and instances by name."""

    PREFIX_FETCH = "prefix_fetch"  # request, tokens: of the prompt's beginning, found in the prefix cache
    KV_LOAD = "kv_load"  # request, start, tokens, src_tier, dst_tier, bytes: keys and values come to a faster tier
    KV_STORE = "kv_store"  # the same, to a slower one
    KV_TRANSFER = "kv_transfer"  # request, start, tokens, src_instance, dst_instance, bytes
    PREFILL_CHUNK = "prefill_chunk"  # request, start, tokens: of the prompt, computed in one step
    DECODE_STEP = "decode_step"  # requests: one further token of each, in one step
    VERIFY = "verify"  # requests, drafts: of each at most so many proposed tokens are checked in one step
    SAMPLE = "sample"  # requests: whose next token is drawn
    COLLECTIVE = "collective"  # op, bytes, group; backend, pieces, fused: how collectives of this sort are done from then on


Count = (int, 0)  # at least
Positive = (int, 1)
# By type: the names that `config` must have, with the type and the least value of each.
FIELDS: Mapping[NodeType, Mapping[str, Any]] = MappingProxyType({
    NodeType.PREFIX_FETCH: {"request": Count, "tokens": Positive},
    NodeType.KV_LOAD: {
        "request": Count, "start": Count, "tokens": Positive, "src_tier": str, "dst_tier": str, "bytes": Count
    },
    NodeType.KV_STORE: {
        "request": Count, "start": Count, "tokens": Positive, "src_tier": str, "dst_tier": str, "bytes": Count
    },
    NodeType.KV_TRANSFER: {
        "request": Count, "start": Count, "tokens": Positive, "src_instance": str, "dst_instance": str, "bytes": Count
    },
    NodeType.PREFILL_CHUNK: {"request": Count, "start": Count, "tokens": Positive},
    NodeType.DECODE_STEP: {"requests": [Count]},
    NodeType.VERIFY: {"requests": [Count], "drafts": [Count]},
    NodeType.SAMPLE: {"requests": [Count]},
    NodeType.COLLECTIVE: {"op": str, "bytes": Count, "group": str},
})  # fmt: skip
# By type: optional names of `config`, with the type and the least value of each.
OPTIONS: Mapping[NodeType, Mapping[str, Any]] = MappingProxyType({
    NodeType.COLLECTIVE: {"backend": str, "pieces": Positive, "fused": bool}
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class IRNode:
    """One piece of work. It depends on the nodes that give its inputs; an input that no node gives was there before.

    `config` has what its type asks for (`NodeType`) and may have more, as long as JSON can say it: passes and users leave
    their remarks there (`reason`, `cost_s`). `device`: on which instance or device; empty for wherever the plan goes.

    Raises:
        PlanError: an unknown type, an empty id, an input or output twice, or a `config` without what the type asks for.
    """

    node_id: str
    node_type: NodeType
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    config: Mapping[str, Any] = field(default_factory=dict)
    device: str = ""

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "node_type", NodeType(self.node_type))
        except ValueError:
            known = ", ".join(each.value for each in NodeType)
            raise PlanError(f"node {self.node_id}: unknown type {self.node_type!r}; known are {known}.") from None
        if not (isinstance(self.node_id, str) and self.node_id):
            raise PlanError(f"node id {self.node_id!r}; give a text that is not empty.")
        for what in ("inputs", "outputs"):
            names = tuple(getattr(self, what))
            if len(set(names)) < len(names) or not all(isinstance(name, str) and name for name in names):
                raise PlanError(f"node {self.node_id}: {what} {list(names)}; give distinct names.")
            object.__setattr__(self, what, names)
        for name, kind in FIELDS[self.node_type].items():
            _check(self.node_id, name, self.config.get(name), kind)
        for name, kind in OPTIONS.get(self.node_type, {}).items():
            if name in self.config:
                _check(self.node_id, name, self.config[name], kind)
        if self.node_type is NodeType.VERIFY and len(self.config["drafts"]) != len(self.config["requests"]):
            raise PlanError(
                f"node {self.node_id}: {len(self.config['drafts'])} drafts for {len(self.config['requests'])} requests; give "
                "one number for each."
            )

    @property
    def requests(self) -> tuple[int, ...]:
        """The requests that the node works for."""
        if "request" in self.config:
            return (self.config["request"],)
        return tuple(self.config.get("requests", ()))


def kv_value(request: int, end: int) -> str:
    """The keys and values of a request's first `end` tokens, where it runs."""
    return f"kv:{request}:{end}"


def logits_value(request: int, position: int) -> str:
    """Return the name of the logits from which the token at this place, counted from 0, is drawn."""
    return f"logits:{request}:{position}"


def token_value(request: int, position: int) -> str:
    """The token at this place of the request."""
    return f"token:{request}:{position}"


def _check(node_id: str, name: str, value: Any, kind: Any) -> None:
    if kind is str:
        if not (isinstance(value, str) and value):
            raise PlanError(f"node {node_id}: {name} is {value!r}; give a text that is not empty.")
    elif kind is bool:
        if not isinstance(value, bool):
            raise PlanError(f"node {node_id}: {name} is {value!r}; give true or false.")
    elif isinstance(kind, list):
        if not isinstance(value, (list, tuple)) or not value:
            raise PlanError(f"node {node_id}: {name} is {value!r}; give a list that is not empty.")
        for each in value:
            _check(node_id, name, each, kind[0])
    else:
        least = kind[1]
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value < math.inf:
            raise PlanError(f"node {node_id}: {name} is {value!r}; give a whole number from {least} on.")
