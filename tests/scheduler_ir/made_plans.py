"""Small plans in few words, and a runner of them on the tests' engine."""

from sagellm.scheduler_ir.graph import IRGraph
from sagellm.scheduler_ir.nodes import IRNode, NodeType
from sagellm.scheduler_ir.plan import ExecutionPlan
from sagellm.scheduler_ir.plan_runner import PlanRunner
from tests.scheduler_ir.fake_engine import FakeEngine


def prefill(name, request, start, tokens, after=()):
    return IRNode(name, NodeType.PREFILL_CHUNK, tuple(after), (name,), {"request": request, "start": start, "tokens": tokens})


def decode(name, requests, after=()):
    return IRNode(name, NodeType.DECODE_STEP, tuple(after), (name,), {"requests": list(requests)})


def sample(name, requests, after):
    return IRNode(name, NodeType.SAMPLE, tuple(after), (name,), {"requests": list(requests)})


def collective(name, backend="shm", num_bytes=1024, after=(), op="all_reduce", group="tp", **more):
    config = {"op": op, "bytes": num_bytes, "group": group, "backend": backend, **more}
    return IRNode(name, NodeType.COLLECTIVE, tuple(after), (name,), config)


class TwoWorkers:
    """Answers of an engine with two workers."""

    checks_drafts = is_recording = False
    comm_backends = {"all_reduce": ("group", "shm"), "all_gather": ("group", "shm")}  # noqa: RUF012


def plan(name, *nodes, requests=None, target=""):
    known = requests or sorted({request for node in nodes for request in node.requests})
    return ExecutionPlan(name, IRGraph(nodes), tuple(known), target)


def states(runner, name="p"):
    return {node: each.state.value for node, each in runner.status(name).nodes.items()}


def detail(runner, node, name="p"):
    return runner.status(name).nodes[node].detail


def start(*plans, requests=((1, 100), (2, 100)), options=None, **engine):
    runner = PlanRunner(wait_for_requests=True, **(options or {}))
    runner.attach(TwoWorkers())
    fake = FakeEngine(runner, **engine)
    for number, prompt, *rest in requests:
        fake.add(number, prompt, *rest)
    for each in plans:
        runner.submit_plan(each)
    return runner, fake
