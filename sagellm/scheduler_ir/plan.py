"""A graph with a name, for certain requests on a certain engine, and what becomes of it."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from sagellm.core.errors import PlanError
from sagellm.core.hooks import RequestId
from sagellm.scheduler_ir.graph import IRGraph

__all__ = ["ExecutionPlan", "ExecutorAPI", "NodeState", "NodeStatus", "PlanState", "PlanStatus"]

FORMAT = 1
FIELDS = ("format", "plan_id", "request_ids", "target_instance_id", "graph")


@dataclass(frozen=True)
class ExecutionPlan:
    """Work to be done, and its order. Equal plans have equal JSON and the other way round.

    Raises:
        PlanError: an empty id, no requests, one twice, or a node that works for a request that is not among them.
    """

    plan_id: str
    ir_graph: IRGraph
    request_ids: tuple[RequestId, ...]
    target_instance_id: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "request_ids", tuple(self.request_ids))
        if not (isinstance(self.plan_id, str) and self.plan_id):
            raise PlanError(f"plan id {self.plan_id!r}; give a text that is not empty.")
        if not self.request_ids or len(set(self.request_ids)) < len(self.request_ids):
            raise PlanError(f"plan {self.plan_id}: requests {list(self.request_ids)}; name at least one, each once.")
        for node in self.ir_graph:
            if foreign := set(node.requests).difference(self.request_ids):
                raise PlanError(
                    f"plan {self.plan_id}: node {node.node_id} works for requests {sorted(foreign)}; the plan is for "
                    f"{list(self.request_ids)}."
                )

    def to_json(self) -> str:
        document = {
            "format": FORMAT, "plan_id": self.plan_id, "request_ids": list(self.request_ids),
            "target_instance_id": self.target_instance_id, "graph": self.ir_graph.to_dict(),
        }  # fmt: skip
        return json.dumps(document, indent=1)

    @classmethod
    def from_json(cls, text: str) -> "ExecutionPlan":
        """Raises PlanError: the text is not what `to_json` writes, or what it says makes no sense."""
        try:
            document = json.loads(text)
        except (ValueError, TypeError, RecursionError) as error:
            raise PlanError(f"this is no JSON ({error}); give what ExecutionPlan.to_json writes.") from None
        if not isinstance(document, dict):
            raise PlanError(f"this is no plan; give an object with {', '.join(FIELDS)}, as ExecutionPlan.to_json does.")
        if missing := [name for name in FIELDS if name not in document]:
            raise PlanError(f"the plan has no {', no '.join(missing)}; every plan needs {', '.join(FIELDS)}.")
        if unknown := sorted(document.keys() - set(FIELDS)):
            raise PlanError(f"the plan has {', '.join(unknown)}; allowed are {', '.join(FIELDS)}.")
        number, requests, target = (document[name] for name in ("format", "request_ids", "target_instance_id"))
        if number != FORMAT or isinstance(number, bool):
            raise PlanError(f"the plan has format {number!r}; this version reads {FORMAT}.")
        # `type`: a truth value is an int too.
        if not isinstance(requests, list) or any(type(each) is not int or each < 0 for each in requests):
            raise PlanError(f"request_ids is {requests!r}; give a list of whole numbers from 0 on.")
        if not isinstance(target, str):
            raise PlanError(f'target_instance_id is {target!r}; give a text, or "" for any instance.')
        return cls(document["plan_id"], IRGraph.from_dict(document["graph"]), tuple(requests), target)


class NodeState(str, Enum):
    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"
    REFUSED = "refused"  # the engine could not do it, or not as it was asked to; `detail` says why and what it did
    CANCELLED = "cancelled"


class PlanState(str, Enum):
    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"  # every node is done or refused
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class NodeStatus:
    state: NodeState
    detail: str = ""


@dataclass(frozen=True, slots=True)
class PlanStatus:
    """`nodes`: by node id, in the order of the graph."""

    plan_id: str
    state: PlanState
    nodes: Mapping[str, NodeStatus] = field(default_factory=dict)

    def refused(self) -> dict[str, str]:
        """By node id, what could not be honoured, and why."""
        return {name: status.detail for name, status in self.nodes.items() if status.state is NodeState.REFUSED}


class ExecutorAPI(Protocol):
    """Runs plans on an engine. Thread-safe.

    Plans run in the order in which they were submitted, the steps of a plan in the order of its graph. Requests of no plan run
    after those of plans, by the engine's own order or a strategy's.
    """

    def submit_plan(self, plan: ExecutionPlan) -> PlanStatus:
        """Raises PlanError: a cycle, an id that was submitted before, a request that is unknown, ended, or of another plan,
        or another instance's plan."""
        ...

    def cancel(self, plan_id: str) -> PlanStatus:
        """Finish running nodes and begin no further one; the plan's requests go on without a plan.

        Raises:
            PlanError: an unknown plan, or one that is done or cancelled.
        """
        ...

    def status(self, plan_id: str) -> PlanStatus:
        """Raises PlanError: an unknown plan."""
        ...
