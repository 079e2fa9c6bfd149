"""Runs plans on any engine that has the `schedule` hook."""

import json
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from sagellm.core.collectives import CommRule, sort_of, unknown_backend
from sagellm.core.errors import PlanError
from sagellm.core.hooks import (
    EngineHandle,
    MigrationPlan,
    Phase,
    Plugin,
    RequestId,
    RequestView,
    ScheduleDecision,
    StepResult,
    StepView,
    Tier,
)
from sagellm.scheduler_ir.given_strategy import given_strategy
from sagellm.scheduler_ir.nodes import IRNode, NodeType
from sagellm.scheduler_ir.plan import ExecutionPlan, NodeState, PlanState, PlanStatus
from sagellm.scheduler_ir.plan_progress import PlanProgress, Work, rule_of
from sagellm.scheduler_ir.request_progress import RequestProgress
from sagellm.scheduler_ir.strategies.base import SchedulingStrategy

__all__ = ["PlanRunner"]

NUM_ENDED = 10_000  # requests of which it is remembered that they have ended


class PlanRunner(Plugin):
    """An `ExecutorAPI` as a plug-in. Each step is that of the first plan which has a node ready: its phase, its requests first,
    its cut. Ready nodes of the same phase go along, of later plans too, and behind them requests of no plan. Requests of
    a plan with no node in the step are held. A prompt that is to be cut goes first or waits for another step.

    A plan may be submitted from any thread at any time; it counts from the next step that the engine chooses, where no plan
    was there before up to 10 ms later (`Plugin.schedule`).

    Args:
        instance_id: of this engine. Plans for another one are refused; one that names none may run anywhere.
        devices: names of this engine that a node may have as its device, beside none and `instance_id`.
        wait_for_requests: whether a plan may name requests that the engine has not told of yet. It then waits for them. Else
            such a plan is refused.
        patience_s: a request that the runner has held for so long goes on as one of no plan, its nodes refused. Must be less
            than what the engine allows, a minute, since that would switch the runner off. Waiting in vain is possible: for a
            request that never comes, or for blocks that a held request keeps.
        keep_plans: finished plans whose status can still be asked for; older ones are forgotten, with their ids.
        strategy: of the requests of no plan: a name, `module:Class`, or an instance; None leaves them to the engine.
        strategy_options: its keyword arguments.

    Raises:
        PlanError: an option that makes no sense, or as the strategy's.
    """

    def __init__(
        self,
        instance_id: str = "",
        devices: Sequence[str] = (),
        wait_for_requests: bool = False,
        patience_s: float = 20.0,
        keep_plans: int = 1000,
        strategy: str | SchedulingStrategy | None = None,
        strategy_options: dict[str, Any] | None = None,
    ) -> None:
        if isinstance(patience_s, bool) or not isinstance(patience_s, (int, float)) or not 0 < patience_s < 60:
            raise PlanError(f"patience_s={patience_s!r}; give seconds above 0 and below 60.")
        if isinstance(keep_plans, bool) or not isinstance(keep_plans, int) or keep_plans < 0:
            raise PlanError(f"keep_plans={keep_plans!r}; give a whole number from 0 on.")
        if strategy is None and strategy_options:
            raise PlanError(f"strategy_options {strategy_options!r} without a strategy; name the strategy too.")
        self.instance_id = instance_id
        self._devices = frozenset(["", instance_id, *devices])
        self._may_wait = wait_for_requests
        self._patience_s = patience_s
        self._keep_plans = keep_plans
        self._strategy = None if strategy is None else given_strategy(strategy, strategy_options, "strategy_options")
        self._engine: EngineHandle | None = None
        self._lock = threading.RLock()
        self._active: dict[str, PlanProgress] = {}  # with open nodes, in the order of submission
        self._finished: dict[str, PlanProgress] = {}  # oldest first
        # Changes from outside since the last step was chosen. They count from the next choice on, where the record has them.
        self._submitted: dict[str, PlanProgress] = {}
        self._cancelled: list[PlanProgress] = []
        self._owner: dict[RequestId, PlanProgress] = {}
        self._requests: dict[RequestId, RequestProgress] = {}
        self._ended: dict[RequestId, None] = {}  # the latest last
        self._is_closed = False
        self._num_plans = self._num_refused = self._num_given_up = 0

    # ---- ExecutorAPI

    def submit_plan(self, plan: ExecutionPlan) -> PlanStatus:
        """As `ExecutorAPI.submit_plan`. Unknown requests: see `wait_for_requests`. Nodes that this engine cannot carry
        out are refused in the returned status; the rest runs."""
        with self._lock:
            self._check(plan)
            return self.take_plan(plan)

    def take_plan(self, plan: ExecutionPlan) -> PlanStatus:
        """As `submit_plan`, without its checks: for a plan that an engine took, when its record is replayed."""
        with self._lock:
            progress = PlanProgress(plan, self._devices)
            self._num_plans += 1
            if progress.open:
                self._submitted[plan.plan_id] = progress
            else:  # every node is refused
                self._finish(progress)
            return progress.status()

    def cancel(self, plan_id: str) -> PlanStatus:
        with self._lock:
            progress = self._find(plan_id)
            state = progress.status().state
            if state in (PlanState.DONE, PlanState.CANCELLED):
                raise PlanError(f"plan {plan_id} is {state.value}; only one that is queued or running can be cancelled.")
            progress.cancel("the plan was cancelled")
            self._cancelled.append(progress)
            return progress.status()

    def status(self, plan_id: str) -> PlanStatus:
        with self._lock:
            return self._find(plan_id).status()

    # ---- hooks

    def attach(self, engine: EngineHandle) -> None:
        self._engine = engine

    def schedule(self, view: StepView) -> ScheduleDecision | None:
        with self._lock:
            self.take_changes()
            rows = {row.request_id: row for row in view.requests}
            self._take_view(view, rows)
            works = self._choose(rows)
            taken = dict.fromkeys(request for work in works for request in work.requests)
            held = self._held(view.now_s, taken, rows)
            free = tuple([row for row in view.requests if row.request_id not in taken and row.request_id not in held])
            rest = self._strategy.decide(view._replace(requests=free)) if self._strategy is not None and free else None
            if not self._active and rest is None:
                return None
            decision = self._decision(view, works, taken, held, free, rest or ScheduleDecision())
            for work in works:
                self._owner[work.requests[0]].asked(work, view.step, rows)
            return decision

    def on_step_end(self, result: StepResult) -> None:
        with self._lock:
            for request, num_tokens in result.computed:
                # A request that no view has shown yet was sent before there were plans: the next view tells all of it.
                if (progress := self._requests.get(request)) is not None:
                    progress.computed(result.phase, num_tokens)
            for plan in list(self._active.values()):
                plan.result(result, self._requests)
            self._retire()
            self._forget_ended()
            if self._strategy is not None:
                self._strategy.on_step_end(result)

    def on_request_end(self, request_id: RequestId) -> None:
        with self._lock:
            self._requests.setdefault(request_id, RequestProgress(request_id)).has_ended = True
            self._ended.pop(request_id, None)
            self._ended[request_id] = None
            if len(self._ended) > NUM_ENDED:
                del self._ended[next(iter(self._ended))]
            for plan in list(self._active.values()):
                for run in plan.leaving(request_id):
                    plan.moved(run, *self._leave(run.node, request_id))
                plan.end(request_id)
            for name, plan in list(self._submitted.items()):  # one may have come too late for any further step
                if all(map(self._has_ended, plan.plan.request_ids)):
                    del self._submitted[name]
                    self._end_all(plan)
                    self._finish(plan)
            self._retire()
            self._forget_ended()
            if self._strategy is not None:
                self._strategy.on_request_end(request_id)

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            self._active |= self._submitted
            self._submitted, self._cancelled = {}, []
            for plan in self._active.values():
                plan.cancel("the engine has ended, or the runner was switched off", with_running=True)
            self._retire()

    def report(self) -> dict[str, Any]:
        with self._lock:
            own = {
                "plans": self._num_plans, "active": len(self._active) + len(self._submitted),
                "nodes_refused": self._num_refused, "requests_given_up": self._num_given_up,
            }  # fmt: skip
            return own if self._strategy is None else {**own, "strategy": self._strategy.report()}

    def running_nodes(self) -> list[list[Any]]:
        """Return a row for each node that a step was asked for and that has no result.

        A row has the type and the requests; start and tokens of a range; the rule of a collective.
        """
        return [
            [run.node.node_type.value, list(run.node.requests)]
            + (list(rule_of(run.node)) if run.node.node_type is NodeType.COLLECTIVE else [])
            + ([run.node.config.get("start", 0), run.node.config["tokens"]] if "tokens" in run.node.config else [])
            for plan in self._active.values() for run in plan.open if run.state is NodeState.RUNNING
        ]  # fmt: skip

    # ---- plans

    def take_changes(self) -> None:
        """Let plans that were submitted or cancelled since the last choice of a step count from now on."""
        if not (self._submitted or self._cancelled):
            return
        for name, progress in self._submitted.items():
            self._active[name] = progress
            for request in progress.plan.request_ids:
                self._owner[request] = progress
            if not self._can_check():
                why = "this engine checks no proposed tokens; start it with a speculative strategy"
                progress.refuse(NodeType.VERIFY, why)
            known = self._comm_backends()
            progress.refuse_rules(lambda rule, known=known: unknown_backend([rule], known))
            self._end_all(progress)
            self._note(
                "submit", plan=json.loads(progress.plan.to_json()), checks_drafts=self._can_check(), comm_backends=dict(known)
            )
        for name in [each.plan.plan_id for each in self._cancelled]:
            if name in self._active:
                self._note("cancel", plan_id=name)
        self._submitted, self._cancelled = {}, []
        self._retire()

    def _has_ended(self, request: RequestId) -> bool:
        known = self._requests.get(request)
        return request in self._ended if known is None else known.has_ended

    def _end_all(self, plan: PlanProgress) -> None:
        """Tell the plan which of its requests have ended by now."""
        for request in filter(self._has_ended, plan.plan.request_ids):
            plan.end(request)

    def _can_check(self) -> bool:
        return self._engine is not None and self._engine.checks_drafts

    def _comm_backends(self) -> Mapping[str, tuple[str, ...]]:
        return {} if self._engine is None else self._engine.comm_backends

    def _rules(self, step: int, rest: Sequence[CommRule]) -> tuple[CommRule, ...]:
        """Return how collectives are done in the next step: as the first plan wants it that says so, else as `rest` does."""
        rules: dict[tuple[str, int], CommRule] = {}
        for plan in self._active.values():
            if not plan.is_cancelled:
                rules |= {sort_of(rule): rule for rule in plan.rules(step, rules.keys())}
        return tuple(({sort_of(rule): rule for rule in rest} | rules).values())

    def _note(self, event: str, **fields: Any) -> None:
        if self._engine is not None and self._engine.is_recording:
            self._engine.record(event, **fields)

    def _check(self, plan: ExecutionPlan) -> None:
        name = f"plan {plan.plan_id}"
        if self._is_closed:
            raise PlanError(f"{name}: the engine has ended, or the runner was switched off; see the log of the engine.")
        if any(plan.plan_id in known for known in (self._submitted, self._active, self._finished)):
            raise PlanError(f"{name} was submitted before; give each plan an id of its own.")
        if plan.target_instance_id not in ("", self.instance_id):
            raise PlanError(
                f"{name} is for instance {plan.target_instance_id!r}; this one is {self.instance_id!r}. Submit it there."
            )
        for request in plan.request_ids:
            if self._has_ended(request):
                raise PlanError(f"{name}: request {request} has ended; leave it out.")
            owners = [one for one in self._submitted.values() if request in one.plan.request_ids]
            owners += [self._owner[request]] if request in self._owner else []
            if others := [one.plan.plan_id for one in owners if not one.is_cancelled]:
                other = others[0]
                raise PlanError(f"{name}: request {request} is of plan {other}; cancel that, or wait until it is done.")
            if request not in self._requests and not self._may_wait:
                raise PlanError(
                    f"{name}: request {request} is unknown; submit the plan when the engine has it, or build the runner with "
                    "wait_for_requests=True."
                )

    def _find(self, plan_id: str) -> PlanProgress:
        found = self._submitted.get(plan_id) or self._active.get(plan_id) or self._finished.get(plan_id)
        if found is None:
            raise PlanError(f"unknown plan {plan_id!r}; submit it first. Finished plans that are kept: {self._keep_plans}.")
        return found

    def _disown(self, progress: PlanProgress) -> None:
        for request in progress.plan.request_ids:
            if self._owner.get(request) is progress:
                del self._owner[request]

    def _retire(self) -> None:
        """Plans that have come to their end give their requests back."""
        for name, plan in list(self._active.items()):
            if not plan.open and plan not in self._cancelled:  # those leave with the next choice of a step
                del self._active[name]
                self._disown(plan)
                self._finish(plan)

    def _finish(self, plan: PlanProgress) -> None:
        self._finished[plan.plan.plan_id] = plan
        self._num_refused += len(plan.status().refused())
        while len(self._finished) > self._keep_plans:
            del self._finished[next(iter(self._finished))]

    def _forget_ended(self) -> None:
        """Forget requests that have ended and are in no plan."""
        for request in [name for name, each in self._requests.items() if each.has_ended and name not in self._owner]:
            del self._requests[request]

    # ---- steps

    def _take_view(self, view: StepView, rows: dict[RequestId, RequestView]) -> None:
        seen = {}
        for request, row in rows.items():
            known = self._requests.get(request)
            if known is None or (known.has_ended and request not in self._owner):  # new, or an id that is used again
                known = self._requests[request] = RequestProgress(
                    request, row.num_computed, row.num_tokens, 0, row.num_generated, row.phase
                )
                self._ended.pop(request, None)
            seen[request] = known.view(row)
        for plan in list(self._active.values()):
            for run in plan.arriving():
                if (request := run.node.requests[0]) in rows:
                    plan.moved(run, *self._arrival(request))
            plan.view(view.step, rows, self._requests, seen)
        self._retire()

    def _arrival(self, request: RequestId) -> tuple[str, bool]:
        """Return the outcome of a transfer to this engine, once its request has joined the queue, and whether it was made."""
        state = "" if self._engine is None else self._engine.transfer_state(request)
        if state == "arrived":
            return "its keys and values arrived", True
        return f"{state or 'the request was sent here without a transfer'}; what is missing is computed here", False

    def _leave(self, node: IRNode, request: RequestId) -> tuple[str, bool]:
        """Carry out a store, or ask what became of a transfer, when the request has ended. As `_arrival`."""
        if self._engine is None:
            return "the runner has no engine handle", False
        if node.node_type is NodeType.KV_TRANSFER:
            state = self._engine.transfer_state(request)
            if state == "read":
                return "the other engine has read it", True
            return state or "the request was sent here without a transfer", False
        if not self._engine.block_counts().host_total:
            return "this engine has no host tier; give it one (host_kv_blocks)", False
        size, start = self._engine.block_size, node.config["start"]
        first, last = -(-start // size), (start + node.config["tokens"]) // size
        blocks = self._engine.request_blocks(request)[first:last]
        if not blocks:
            return f"no whole block of {size} tokens lies in its range", False
        result = self._engine.migrate_blocks(MigrationPlan(Tier.GPU, Tier.CPU, blocks))
        if not result.refused:
            return f"{len(blocks)} blocks of {size} tokens moved to cpu", True
        block, why = next(iter(result.refused.items()))
        return f"{len(result.moved)} of {len(blocks)} blocks moved to cpu; block {block}: {why}", False

    def _choose(self, rows: dict[RequestId, RequestView]) -> list[Work]:
        """The works of the next step, those of the first plan that has any first."""
        works: list[Work] = []
        taken: set[RequestId] = set()
        for plan in self._active.values():
            if plan.is_cancelled:
                continue
            for work in plan.ready(rows):
                is_first = not works
                if not is_first and (work.phase is not works[0].phase or work.chunk is not None):
                    continue
                if taken.isdisjoint(work.requests):
                    works.append(work)
                    taken.update(work.requests)
        return works

    def _held(
        self, now_s: float, taken: dict[RequestId, None], rows: dict[RequestId, RequestView]
    ) -> dict[RequestId, str]:
        """Return the requests that wait for a node of their plan, with the reason. A request that has waited too long is
        released."""
        held: dict[RequestId, str] = {}
        for plan in list(self._active.values()):
            if plan.is_cancelled:
                continue
            waiting = plan.waiting_requests().difference(taken)
            for request in [each for each in rows if each in waiting]:
                if self._is_patient(request, now_s):
                    held[request] = f"plan {plan.plan.plan_id}: its next node is not ready"
                else:
                    self._num_given_up += 1
                    plan.give_up(request, f"held for {self._patience_s:g} s in vain; the request goes on without its plan")
        self._retire()
        return held

    def _is_patient(self, request: RequestId, now_s: float) -> bool:
        progress = self._requests[request]
        if progress.held_since_s is None:
            progress.held_since_s = now_s
        return now_s - progress.held_since_s <= self._patience_s

    def _decision(
        self,
        view: StepView,
        works: list[Work],
        taken: dict[RequestId, None],
        held: dict[RequestId, str],
        free: Sequence[RequestView],
        rest: ScheduleDecision,
    ) -> ScheduleDecision:
        """The plans' requests first, then the free ones as `rest` has them, then the held ones."""
        behind = [row.request_id for row in free] if rest.order is None else list(rest.order)
        hold = {*held, *rest.hold}
        reasons = {**rest.reasons, **held}
        chunks = dict(rest.chunk_tokens)
        drafts = dict(rest.draft_tokens)
        for work in works:  # a decode step is one token, unless guesses are asked for
            drafts.update(zip(work.requests, work.drafts, strict=False))
        if works:
            # Only the first of a step can be cut. A free one that is to be cut waits for a step that no plan begins,
            # but no longer than it may: then it goes whole.
            if works[0].phase is Phase.PREFILL:
                hold.update(request for request in chunks if self._is_patient(request, view.now_s))
            chunks = {}
            if works[0].chunk is not None:
                chunks[works[0].requests[0]] = works[0].chunk
            for work in works:
                plan_id = self._owner[work.requests[0]].plan.plan_id
                reasons.update((request, f"plan {plan_id}: {work.run.node.node_id}") for request in work.requests)
        for row in view.requests:
            if row.request_id not in hold:
                self._requests[row.request_id].held_since_s = None
        return ScheduleDecision(
            order=[*taken, *behind, *held],
            hold=frozenset(hold),
            token_budget=None if works else rest.token_budget,
            reason=f"plan {self._owner[works[0].requests[0]].plan.plan_id}" if works else rest.reason,
            phase=works[0].phase if works else rest.phase,
            chunk_tokens=chunks,
            reasons=reasons,
            draft_tokens=drafts,
            collectives=self._rules(view.step, rest.collectives),
        )
