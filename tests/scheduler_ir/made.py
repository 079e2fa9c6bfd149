"""Queues, decisions and graphs that Hypothesis makes, and nodes in a word."""

from typing import Any

from hypothesis import strategies as st

from sagellm.core.hooks import Phase, RequestView, ScheduleDecision, StepView
from sagellm.scheduler_ir.graph import IRGraph
from sagellm.scheduler_ir.nodes import IRNode, NodeType


def node(node_id: str, kind: NodeType, inputs: str = "", outputs: str = "", device: str = "", **config: Any) -> IRNode:
    """Inputs and outputs: names with spaces between them."""
    return IRNode(node_id, kind, tuple(inputs.split()), tuple(outputs.split()), config, device)


def chain(**inputs: str) -> IRGraph:
    """sample nodes by id, each giving a value of its own name."""
    return IRGraph(node(name, NodeType.SAMPLE, taken, name, requests=[0]) for name, taken in inputs.items())


def waiting(name: int, tokens: int, computed: int = 0) -> RequestView:
    return RequestView(name, Phase.PREFILL, tokens, computed, 0, 1, 0.0)


def running(name: int, tokens: int) -> RequestView:
    return RequestView(name, Phase.DECODE, tokens, tokens - 1, 1, 1, 0.0)


def view(*requests: RequestView, **fields: Any) -> StepView:
    usual = dict(step=1, phase=Phase.DECODE, free_blocks=100, token_budget=4096)
    return StepView(requests=requests, **usual | fields)


@st.composite
def queues(draw: st.DrawFn) -> tuple[RequestView, ...]:
    requests = []
    for name in draw(st.permutations(range(draw(st.integers(0, 7))))):
        tokens = draw(st.integers(1, 40))
        if draw(st.booleans()):
            requests.append(waiting(name, tokens, draw(st.sampled_from([0, 0, tokens // 2, tokens - 1]))))
        else:
            requests.append(running(name, tokens))
    return tuple(requests)


@st.composite
def decided(draw: st.DrawFn) -> tuple[StepView, ScheduleDecision]:
    requests = draw(queues())
    names = [request.request_id for request in requests]
    decision = ScheduleDecision(
        order=draw(st.none() | st.permutations(names)),
        hold=frozenset(draw(st.sets(st.sampled_from(names)))) if names else frozenset(),
        token_budget=draw(st.none() | st.integers(1, 100)),
        phase=draw(st.sampled_from([None, *Phase])),
        chunk_tokens=draw(st.dictionaries(st.sampled_from(names), st.integers(1, 50))) if names else {},
    )
    num_running = sum(request.phase is Phase.DECODE for request in requests)
    return view(*requests, max_batch_size=draw(st.sampled_from([0, num_running, num_running + 3]))), decision


REMARKS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3), max_leaves=6,
)  # fmt: skip
TEXTS = st.text(st.characters(exclude_categories=()), min_size=1, max_size=8)  # lone surrogates too


@st.composite
def configs(draw: st.DrawFn, kind: NodeType) -> dict[str, Any]:
    """Draw a config: the fields that the type asks for, and remarks."""
    tokens, count = draw(st.integers(1, 20)), draw(st.integers(0, 10**12))
    needed = {"request": draw(st.integers(0, 3)), "start": draw(st.integers(0, 20)), "tokens": tokens, "bytes": count,
              "requests": [1, 2], "drafts": [1, 3], "op": "all_reduce", "group": draw(TEXTS)}  # fmt: skip
    for way in ("tier", "instance"):
        needed |= {f"src_{way}": draw(TEXTS), f"dst_{way}": draw(TEXTS)}
    return draw(st.dictionaries(st.text(max_size=5), REMARKS, max_size=2)) | needed


@st.composite
def graphs(draw: st.DrawFn) -> IRGraph:
    """Any graph without a cycle, its nodes in no certain order."""
    nodes, values = [], ["outside"]
    ids = draw(st.lists(TEXTS, unique=True, max_size=6))
    for index, name in enumerate(ids):
        kind = draw(st.sampled_from(NodeType))
        outputs = [f"v{index}.{each}" for each in range(draw(st.integers(0, 2)))]
        inputs = draw(st.lists(st.sampled_from(values), unique=True, max_size=3))
        nodes.append(IRNode(name, kind, tuple(inputs), tuple(outputs), draw(configs(kind)), draw(st.just("") | TEXTS)))
        values += outputs
    return IRGraph(draw(st.permutations(nodes)))
