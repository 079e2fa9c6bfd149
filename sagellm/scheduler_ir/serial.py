"""A node as JSON says it, and back without loss."""

import math
from collections.abc import Mapping
from typing import Any

from sagellm.core.errors import PlanError
from sagellm.scheduler_ir.nodes import IRNode

__all__ = ["FORMAT", "node_from_dict", "node_to_dict", "plain"]

FORMAT = 1
FIELDS = ("id", "type", "inputs", "outputs", "config", "device")


def node_to_dict(node: IRNode) -> dict[str, Any]:
    """Empty fields are left out. Raises PlanError: a config that JSON cannot say."""
    document: dict[str, Any] = {"id": node.node_id, "type": node.node_type.value}
    for name in ("inputs", "outputs"):
        if values := getattr(node, name):
            document[name] = list(values)
    if node.config:
        document["config"] = plain(node.config, f"node {node.node_id}: config")
    if node.device:
        document["device"] = node.device
    return document


def node_from_dict(document: Any, index: int) -> IRNode:
    """`index`: its place, for messages about a node without an id. Raises PlanError, naming the node."""
    if not isinstance(document, Mapping):
        raise PlanError(f"node number {index} is {document!r}; give an object with {', '.join(FIELDS)}.")
    name = f"node {document['id']}" if isinstance(document.get("id"), str) and document["id"] else f"node number {index}"
    if unknown := sorted(map(str, document.keys() - set(FIELDS))):
        raise PlanError(f"{name} has {', '.join(unknown)}; allowed are {', '.join(FIELDS)}.")
    if missing := [field for field in ("id", "type") if field not in document]:
        raise PlanError(f"{name} has no {' and no '.join(missing)}; every node needs id and type.")
    for field in ("inputs", "outputs"):
        if not isinstance(document.get(field, []), (list, tuple)):
            raise PlanError(f"{name}: {field} is {document[field]!r}; give a list of names.")
        if not all(isinstance(value, str) for value in document.get(field, [])):
            raise PlanError(f"{name}: {field} is {document[field]!r}; every name must be a text.")
    if not isinstance(document.get("config", {}), Mapping):
        raise PlanError(f"{name}: config is {document['config']!r}; give an object.")
    if not isinstance(document.get("device", ""), str):
        raise PlanError(f"{name}: device is {document['device']!r}; give a text.")
    if not isinstance(document["type"], str):
        raise PlanError(f"{name}: type is {document['type']!r}; give a text.")
    if not isinstance(document["id"], str):
        raise PlanError(f"{name}: id is {document['id']!r}; give a text that is not empty.")
    return IRNode(
        document["id"], document["type"], tuple(document.get("inputs", ())), tuple(document.get("outputs", ())),
        plain(document.get("config", {}), f"{name}: config"), document.get("device", ""),
    )  # fmt: skip


def plain(value: Any, where: str) -> Any:
    """A copy of dicts, lists, texts, numbers, truth values and None, keys sorted, so that equal configs have equal JSON. Raises
    PlanError: anything else is in it."""
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise PlanError(f"{where} is {value}, which JSON cannot say; give a finite number.")
        return value
    if isinstance(value, (list, tuple)):
        return [plain(each, f"{where}[{index}]") for index, each in enumerate(value)]
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise PlanError(f"{where} has the key {key!r}; JSON has only texts as keys.")
        return {key: plain(each, f"{where}.{key}") for key, each in sorted(value.items())}
    raise PlanError(f"{where} is {value!r}; use what JSON can say: texts, numbers, lists and objects.")
