"""Progress of the nodes of one plan on an engine: which can run now, and what views and results say of them."""

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field

from sagellm.core.collectives import MAX_PIECES, CommRule, sort_of
from sagellm.core.hooks import Phase, RequestId, RequestView, StepResult
from sagellm.scheduler_ir.nodes import IRNode, NodeType
from sagellm.scheduler_ir.plan import ExecutionPlan, NodeState, NodeStatus, PlanState, PlanStatus
from sagellm.scheduler_ir.request_progress import RequestProgress, Seen

__all__ = ["ALL_WORKERS", "NodeRun", "PlanProgress", "Work", "rule_of"]

ALL_WORKERS = "tp"  # the group of all workers, the only one that an engine decides about
# The engine does these with its lookup, just before it computes: they delay no step, and their result is seen afterwards.
WITH_LOOKUP = (NodeType.PREFIX_FETCH, NodeType.KV_LOAD)
# These happen before a request joins the queue, or when it leaves: they delay no step either.
BESIDE_STEPS = (*WITH_LOOKUP, NodeType.KV_TRANSFER, NodeType.KV_STORE)
DECODES = (NodeType.DECODE_STEP, NodeType.VERIFY)
OPEN = (NodeState.WAITING, NodeState.RUNNING)


@dataclass(slots=True, eq=False)
class NodeRun:
    """One node's way. `pending`: requests that it is still to be done for. `steps`: in which it was computed, or a part of it.

    `asked`: the step that it was asked of last, `begun`, `limit`: how many of a prompt's tokens were there
    then, and how many it has. `ran`: something was
    computed, or was there. `is_again`: it was done, and its request lost its blocks. `is_unnamed`: the step it was asked of has
    ended, and the engine does not say who was in it.
    """

    node: IRNode
    before: list["NodeRun"]
    pending: set[RequestId]
    state: NodeState = NodeState.WAITING
    detail: str = ""
    asked: int = -1
    begun: int = 0
    limit: int = 0
    why: str = ""
    steps: list[int] = field(default_factory=list)
    ran: bool = False
    is_again: bool = False
    is_unnamed: bool = False

    @property
    def is_open(self) -> bool:
        return self.state in OPEN

    @property
    def end(self) -> int:
        """End of the node's range of tokens."""
        return self.node.config.get("start", 0) + self.node.config["tokens"]


@dataclass(frozen=True, slots=True)
class Work:
    """Wishes of a node for the next step. `chunk`: cut the prompt there. `drafts`: most guesses of each request. `is_extra`: a
    decode step's requests have prompt tokens left that no node computes, so that they come first."""

    run: NodeRun
    phase: Phase
    requests: tuple[RequestId, ...]
    chunk: int | None = None
    drafts: tuple[int, ...] = ()
    is_extra: bool = False


class PlanProgress:
    """A state for every node. Not thread-safe: its owner has a lock.

    Args:
        devices: what a node may name as its device and still be done as asked.

    Raises:
        PlanError: the graph has a cycle.
    """

    def __init__(self, plan: ExecutionPlan, devices: Collection[str] = ("",)) -> None:
        self.plan = plan
        self.is_cancelled = False
        self._told = -1  # the last step with a result
        self._devices = frozenset(devices)
        self.runs: dict[str, NodeRun] = {}
        for node in plan.ir_graph.topological_order():
            before = self._before([self.runs[name] for name in plan.ir_graph.predecessors(node.node_id)])
            run = self.runs[node.node_id] = NodeRun(node, before, set(node.requests))
            if node.node_type is NodeType.COLLECTIVE:
                if why := self._obstacle(node):
                    self._settle(run, NodeState.REFUSED, why)
            elif node.node_type is NodeType.KV_TRANSFER:
                source, target = self._end(node, "src"), self._end(node, "dst")
                if self._devices.isdisjoint((source, target)):
                    self._settle(run, NodeState.REFUSED, f"it goes from {source} to {target}; this engine is neither")
            elif node.node_type is NodeType.KV_STORE and (node.config["src_tier"], node.config["dst_tier"]) != ("gpu", "cpu"):
                pair = f"{node.config['src_tier']} -> {node.config['dst_tier']}"
                self._settle(run, NodeState.REFUSED, f"a plan stores from gpu to cpu, not {pair}; policies do the rest")
        self._ended: set[RequestId] = set()
        self._has_come = False  # one of its requests, at least
        self._open = list(self.runs.values())
        self._index()
        self._settle_rest()

    # ---- asked by the owner

    @property
    def open(self) -> list[NodeRun]:
        """Open nodes, in topological order."""
        self._open = [run for run in self._open if run.is_open]
        return self._open

    def waiting_requests(self) -> set[RequestId]:
        """Those that something is still to be computed for."""
        return {
            request for request in self.plan.request_ids
            if any(
                run.is_open and request in run.pending and run.node.node_type not in BESIDE_STEPS
                for run in self._left(self._of, request)
            )
        }  # fmt: skip

    def status(self) -> PlanStatus:
        nodes = {
            node.node_id: NodeStatus(self.runs[node.node_id].state, self.runs[node.node_id].detail)
            for node in self.plan.ir_graph
        }
        states = {run.state for run in self.runs.values()}
        if self.is_cancelled or states == {NodeState.CANCELLED}:
            state = PlanState.CANCELLED
        elif not states.intersection(OPEN):
            state = PlanState.DONE
        elif any(run.asked >= 0 or run.ran for run in self.runs.values()):
            state = PlanState.RUNNING
        else:
            state = PlanState.QUEUED
        return PlanStatus(self.plan.plan_id, state, nodes)

    def ready(self, rows: Mapping[RequestId, RequestView]) -> Iterator[Work]:
        """Yield work that could be in the next step, in topological order. A node's requests go together, so all of them
        must be there."""
        passed: set[int] = set()  # of those that the lookup does: what they hang on is done
        for run in self.open:
            kind = run.node.node_type
            if any(one.is_open and id(one) not in passed for one in run.before):
                continue
            if kind in BESIDE_STEPS:
                passed.add(id(run))
            elif kind not in (NodeType.SAMPLE, NodeType.COLLECTIVE) and all(request in rows for request in run.pending):
                yield from self._work(run, rows)

    def rules(self, step: int, taken: Collection[tuple[str, int]]) -> list[CommRule]:
        """Return how collectives are done in the next step. Nodes begin whose predecessors are done, once a request is there.

        Args:
            taken: sorts of collectives that an earlier plan decides about, by name and size.
        """
        rules: dict[tuple[str, int], CommRule] = {}
        for run in self.open if self._collectives and self._has_come else ():
            if run.node.node_type is not NodeType.COLLECTIVE or any(one.is_open for one in run.before):
                continue
            rule = rule_of(run.node)
            sort = sort_of(rule)
            if sort in taken or sort in rules:
                run.detail = "another node decides about collectives of this sort"
                continue
            if run.state is NodeState.WAITING:
                run.state, run.asked, run.detail = NodeState.RUNNING, step, ""
            rules[sort] = rule
        return list(rules.values())

    # ---- told by the owner

    def asked(self, work: Work, step: int, rows: Mapping[RequestId, RequestView]) -> None:
        run = work.run
        if work.is_extra:
            run.detail = f"requests {list(work.requests)} had tokens left that no node computes; computed first"
            return
        run.state, run.asked = NodeState.RUNNING, step
        if run.node.node_type is NodeType.PREFILL_CHUNK and not run.steps:
            run.begun, run.limit = rows[work.requests[0]].num_computed, rows[work.requests[0]].num_tokens

    def view(
        self,
        step: int,
        rows: Mapping[RequestId, RequestView],
        progress: Mapping[RequestId, RequestProgress],
        seen: Mapping[RequestId, Seen],
    ) -> None:
        """The queue before `step`. Its requests have no step in flight: their results are known now."""
        for request in self.plan.request_ids:
            if request not in rows:
                continue
            self._has_come = True
            if seen[request].is_preempted:
                self._reopen(request, rows[request].num_computed, step)
            for _ in range(seen[request].num_decoded):
                self._decoded(request, step - 1)
            self._reached(progress[request], is_exact=True)
        for run in self.open:
            ended = {each for each in run.pending if each in progress and progress[each].has_ended}
            for request in ended:
                self._leave(run, request)
            if run.is_open and run.state is NodeState.RUNNING and run.pending.intersection(rows):
                run.state = NodeState.WAITING
                if self.is_cancelled:
                    self._settle(run, NodeState.CANCELLED, "the plan was cancelled")
                elif run.asked < step and run.asked not in run.steps:
                    again = "the request lost its blocks; " if run.is_again else ""
                    run.detail = f"{again}the engine had no room for it in step {run.asked}, or took another step"
        self._settle_rest()

    def result(self, result: StepResult, progress: Mapping[RequestId, RequestProgress]) -> None:
        """A step has ended; `progress` knows of it. If it names no request, the next view tells."""
        self._told = result.step
        for run in self._collectives:
            if run.state is NodeState.RUNNING and run.asked <= result.step and not run.steps:
                run.steps.append(result.step)
        if not result.computed:
            for run in self.open:
                is_prompt = run.node.node_type is NodeType.PREFILL_CHUNK
                run.is_unnamed = run.asked == result.step and is_prompt is (result.phase is Phase.PREFILL)
        refused = dict(result.refused)
        own = set(self.plan.request_ids)
        for request, num_tokens in result.computed:
            if request not in own or request not in progress:
                continue
            if result.phase is Phase.DECODE:
                self._decoded(request, result.step, num_tokens)
                continue
            for run in self._open_of(request):
                if run.node.node_type is NodeType.PREFILL_CHUNK and run.state is NodeState.RUNNING:
                    run.steps.append(result.step)
                    run.why = refused.get(request, run.why)
            self._reached(progress[request])
        for run in self.open:
            if run.asked <= result.step:
                for request in [each for each in run.pending if each in progress and progress[each].has_ended]:
                    self._leave(run, request)
        self._settle_rest()

    def end(self, request: RequestId) -> None:
        """It is complete, cancelled or failed. Work in flight stays open: its result may come later."""
        self._ended.add(request)
        for run in self._open_of(request):
            if run.state is NodeState.WAITING or run.asked <= self._told:
                self._leave(run, request)
        self._settle_rest()

    def give_up(self, request: RequestId, why: str) -> None:
        """Its nodes are not waited for any more; it goes on as a request of no plan."""
        for run in self._open_of(request):
            run.pending.discard(request)
            run.detail = run.why = why
            if not run.pending:
                self._settle(run, NodeState.REFUSED, why)
        self._settle_rest()

    def cancel(self, why: str, with_running: bool = False) -> None:
        """Waiting nodes are not begun. `with_running`: nor will anybody hear of what is on its way."""
        self.is_cancelled = True
        for run in self.open:
            if run.node.node_type is NodeType.COLLECTIVE:
                self._settle(run, NodeState.CANCELLED, "; ".join(filter(None, [_done_by(run), why])))
            elif with_running or run.state is NodeState.WAITING:
                self._settle(run, NodeState.CANCELLED, why)

    def refuse(self, kind: NodeType, why: str) -> None:
        """This engine cannot do nodes of this kind."""
        for run in self.open:
            if run.node.node_type is kind:
                self._settle(run, NodeState.REFUSED, why)

    def refuse_rules(self, why: Callable[[CommRule], str]) -> None:
        """Refuse collectives that the engine cannot do so. `why`: says it of a rule; empty if the engine can."""
        for run in self._collectives:
            if run.is_open and (reason := why(rule_of(run.node))):
                self._settle(run, NodeState.REFUSED, reason)
        self._settle_rest()

    def arriving(self) -> list[NodeRun]:
        """Open transfers to this engine."""
        return [run for run in self._moves if run.is_open and self._end(run.node, "dst") in self._devices]

    def leaving(self, request: RequestId) -> list[NodeRun]:
        """Open transfers and stores of a request that has just ended: they happen now, or never."""
        return [run for run in self._open_of(request) if run.node.node_type in (NodeType.KV_STORE, NodeType.KV_TRANSFER)]

    def moved(self, run: NodeRun, detail: str, is_done: bool) -> None:
        """The outcome of a transfer or a store."""
        run.pending.clear()
        run.ran = is_done
        self._settle(run, NodeState.DONE if is_done else NodeState.REFUSED, detail)

    # ---- what follows

    @staticmethod
    def _before(runs: list[NodeRun]) -> list[NodeRun]:
        """Return what must be done before a node. A collective is part of steps: what it takes must be done, and not it."""
        found = [run.before if run.node.node_type is NodeType.COLLECTIVE else [run] for run in runs]
        return list(dict.fromkeys(itertools.chain.from_iterable(found)))

    def _obstacle(self, node: IRNode) -> str:
        """Return why no engine follows a collective's node; empty if one may."""
        if "backend" not in node.config:
            return "it names no backend, and the engine's workers run the collectives of their model by themselves"
        if node.config["group"] != ALL_WORKERS:
            return f"an engine decides about the group {ALL_WORKERS} of all workers, not {node.config['group']}"
        if node.config.get("pieces", 1) > MAX_PIECES:
            return f"a sum is done in 1 to {MAX_PIECES} pieces, not {node.config['pieces']}"
        if node.device not in self._devices:
            return f"it is for device {node.device!r}, and this engine is another"
        return ""

    @staticmethod
    def _end(node: IRNode, end: str) -> str:
        return str(node.config[f"{end}_instance"])

    def _work(self, run: NodeRun, rows: Mapping[RequestId, RequestView]) -> Iterator[Work]:
        requests = tuple(request for request in run.node.requests if request in run.pending)
        behind = tuple(request for request in requests if rows[request].phase is Phase.PREFILL)
        if run.node.node_type in DECODES:
            if behind:
                yield Work(run, Phase.PREFILL, behind, is_extra=True)
            elif requests:
                most = dict(zip(run.node.requests, run.node.config.get("drafts", ()), strict=False))
                yield Work(run, Phase.DECODE, requests, drafts=tuple(most.get(request, 0) for request in requests))
        elif behind:
            row = rows[behind[0]]
            # One that lost its blocks has its answer's tokens behind the prompt: the last chunk takes them along.
            is_rest = run.is_again and all(
                one is run or one.node.node_type is not NodeType.PREFILL_CHUNK for one in self._open_of(behind[0])
            )
            is_whole = is_rest or run.end >= row.num_tokens
            yield Work(run, Phase.PREFILL, behind, None if is_whole else max(1, run.end - row.num_computed))

    def _index(self) -> None:
        """All nodes by request, and those of ranges of tokens and of decode steps: a step must not look at every node."""
        self._collectives = [run for run in self._open if run.node.node_type is NodeType.COLLECTIVE]
        self._moves = [run for run in self._open if run.node.node_type is NodeType.KV_TRANSFER]
        self._of: dict[RequestId, list[NodeRun]] = {request: [] for request in self.plan.request_ids}
        self._ranges: dict[RequestId, list[NodeRun]] = {request: [] for request in self.plan.request_ids}
        self._decodes: dict[RequestId, list[NodeRun]] = {request: [] for request in self.plan.request_ids}
        for run in self._open:
            for request in run.node.requests:
                self._of[request].append(run)
                if run.node.node_type in DECODES:
                    self._decodes[request].append(run)
                elif "tokens" in run.node.config and run.node.node_type not in (NodeType.KV_TRANSFER, NodeType.KV_STORE):
                    self._ranges[request].append(run)

    def _left(self, index: dict[RequestId, list[NodeRun]], request: RequestId) -> list[NodeRun]:
        """Return these from the first open one on."""
        runs = index.get(request, [])
        while runs and not (runs[0].is_open and request in runs[0].pending):
            del runs[0]
        return runs

    def _open_of(self, request: RequestId) -> list[NodeRun]:
        """Return its open nodes, in topological order."""
        self._of[request] = [run for run in self._of.get(request, ()) if run.is_open and request in run.pending]
        return list(self._of[request])

    def _reached(self, progress: RequestProgress, is_exact: bool = False) -> None:
        """Settle what lies within the tokens that are there by now. `is_exact`: a view has just told how many these are."""
        for run in list(self._left(self._ranges, progress.request_id)):
            if not run.is_open or progress.request_id not in run.pending:
                continue
            if run.node.node_type is NodeType.PREFILL_CHUNK:
                if progress.position >= run.end or (is_exact and progress.phase is Phase.DECODE):
                    self._settle_prefill(run, progress)
            elif run.node.node_type in WITH_LOOKUP:
                if progress.num_found >= run.end:
                    self._settle(run, NodeState.DONE, f"{progress.num_found} tokens were there")
                elif progress.num_heard and is_exact:
                    text = f"{progress.num_found} tokens were found in the engine's cache; the rest of {run.end} is computed"
                    self._settle(run, NodeState.REFUSED, text)

    def _settle_prefill(self, run: NodeRun, progress: RequestProgress) -> None:
        start, end = run.node.config["start"], run.end
        run.ran = True
        if run.why:
            self._settle(run, NodeState.REFUSED, f"{run.why}; computed in step {_steps(run.steps)}")
        elif not run.steps and progress.num_found >= min(end, progress.num_tokens):
            self._settle(run, NodeState.DONE, "its keys and values were there")
        elif not run.steps:
            text = "computed with tokens beside it, or before it was asked for; not in a step of its own"
            self._settle(run, NodeState.REFUSED, text)
        elif len(run.steps) > 1:
            self._settle(run, NodeState.REFUSED, f"computed in steps {_steps(run.steps)}, not in one")
        elif run.begun < start:
            text = f"computed from token {run.begun} on: tokens {run.begun} to {start - 1} were not there"
            self._settle(run, NodeState.REFUSED, text)
        elif end > run.limit:
            self._settle(run, NodeState.REFUSED, f"the request has {run.limit} tokens; computed up to there")
        elif run.begun > start:
            self._settle(run, NodeState.DONE, f"from token {run.begun} on; those before were there")
        else:
            self._settle(run, NodeState.DONE, run.detail)

    def _decoded(self, request: RequestId, step: int, num_tokens: int = 1) -> None:
        """It has further tokens: the first decode step that waits for one of this request has them."""
        for run in self._left(self._decodes, request)[:1]:
            if run.state is NodeState.WAITING and run.asked < 0:
                run.detail = f"decoded in step {step}, before it was asked for"
            if run.node.node_type is NodeType.VERIFY:
                run.detail = f"{run.detail}, " if run.steps else ""
                run.detail += f"request {request} got {num_tokens} tokens in step {step}"
            run.pending.discard(request)
            run.steps.append(step)
            run.ran = True
            if not run.pending:
                self._settle_decode(run)

    def _settle_decode(self, run: NodeRun) -> None:
        if len(set(run.steps)) > 1:
            self._settle(run, NodeState.REFUSED, f"its requests were decoded in steps {_steps(run.steps)}, not in one")
        elif run.why:  # a request that it was given up for
            self._settle(run, NodeState.REFUSED, run.why)
        else:
            self._settle(run, NodeState.DONE, run.detail)

    def _leave(self, run: NodeRun, request: RequestId) -> None:
        """The request has ended."""
        run.pending.discard(request)
        if run.node.node_type is NodeType.PREFILL_CHUNK and run.steps:
            run.ran = True
            self._settle(run, NodeState.DONE, run.detail)
        elif run.is_unnamed and not run.pending:
            run.ran = True
            text = f"request {request} ended with step {run.asked}, and the engine does not say who was in it"
            self._settle(run, NodeState.DONE, text)
        elif not run.pending and run.steps:
            run.detail = f"request {request} ended before"
            self._settle_decode(run)
        elif run.node.node_type in WITH_LOOKUP:
            self._settle(run, NodeState.CANCELLED, f"request {request} ended before it was told what was found")
        elif not run.pending and run.node.node_type is not NodeType.SAMPLE:
            self._settle(run, NodeState.CANCELLED, f"request {request} ended before")

    def _reopen(self, request: RequestId, num_computed: int, step: int) -> None:
        """Its blocks were taken. The rest of the plan needs them again."""
        if not self._open_of(request):
            return
        for run in self.runs.values():
            if run.node.node_type is NodeType.PREFILL_CHUNK and run.node.requests == (request,):
                if run.state is not NodeState.CANCELLED and run.end > num_computed and (run.ran or run.steps):
                    run.state, run.pending, run.steps, run.why, run.ran = NodeState.WAITING, {request}, [], "", False
                    run.is_again = True
                    run.detail = f"the request lost its blocks before step {step}; computed again"
        self._open = list(self.runs.values())
        self._index()

    def _settle_rest(self) -> None:
        """Settle what goes by other nodes: samples, and collectives, which end with all else."""
        self._settle_samples()
        if not self._collectives:
            return
        others = [run for run in self.runs.values() if run.node.node_type is not NodeType.COLLECTIVE]
        if any(run.is_open for run in others) or (not others and not self._ended.issuperset(self.plan.request_ids)):
            return
        for run in self._collectives:
            if run.is_open and run.steps:
                self._settle(run, NodeState.DONE, _done_by(run))
            elif run.is_open:
                self._settle(run, NodeState.REFUSED, run.detail or "no step followed in which it could have been so")

    def _settle_samples(self) -> None:
        """A token is drawn in the step that computes what it is drawn from."""
        for run in self.open:
            if run.node.node_type is not NodeType.SAMPLE or any(one.is_open for one in run.before):
                continue
            run.pending.clear()
            if any(one.ran for one in run.before):
                self._settle(run, NodeState.DONE, "")
            elif run.before and all(one.state is NodeState.CANCELLED for one in run.before):
                self._settle(run, NodeState.CANCELLED, "nothing that it draws from was computed")
            else:
                text = "no node gives what it draws from" if not run.before else "nothing that it draws from was computed"
                self._settle(run, NodeState.REFUSED, f"{text}; the engine draws with every step")

    def _settle(self, run: NodeRun, state: NodeState, detail: str) -> None:
        if state is NodeState.DONE and run.node.device not in self._devices:
            state, detail = NodeState.REFUSED, f"ran on this engine, not on device {run.node.device!r}"
        run.state, run.detail = state, detail


def rule_of(node: IRNode) -> CommRule:
    """Return the wish of a collective's node."""
    config = node.config
    return CommRule(config["op"], config["bytes"], config["backend"], config.get("pieces"), config.get("fused", True))


def _done_by(run: NodeRun) -> str:
    """Say by which backend steps did collectives of a node's sort, and since when; empty if there were no steps."""
    if not run.steps:
        return ""
    rule = rule_of(run.node)
    pieces = f" in {rule.pieces} pieces" if (rule.pieces or 1) > 1 else ""
    return f"by {rule.backend}{pieces} from step {run.steps[0]} on"


def _steps(steps: list[int]) -> str:
    return ", ".join(map(str, sorted(set(steps))))
