"""Asks the strategy that made a log again, each recorded question in turn, and lists every decision that differs.

A fresh strategy gets what it got in the engine, in the order of the log: the views of `schedule` lines, the results of `step`
lines, the ends of `end` lines. Its answer goes through its graph and its lowering once more, and each field must equal
the recorded one.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from sagellm.core.answers import check_schedule
from sagellm.core.errors import PlanError, TraceError
from sagellm.core.hooks import BlockCounts, Phase, RequestId, ScheduleDecision, StepResult
from sagellm.core.schedule_lines import LEFT
from sagellm.replay.base import MAX_KEY, shortened
from sagellm.replay.record_lines import Checked, Difference, check_number, record_lines
from sagellm.replay.schedule.decisions import DecisionReader
from sagellm.replay.schedule.log import computed_rows, plugins_of
from sagellm.replay.traces.json_lines import member
from sagellm.replay.traces.lines import Broken
from sagellm.replay.traces.rows import seconds, whole
from sagellm.scheduler_ir.from_views import StrategyFromViews
from sagellm.scheduler_ir.plan import ExecutionPlan
from sagellm.scheduler_ir.strategy_plugin import StrategyPlugin

__all__ = ["ScheduleReport", "verify_schedule"]

PLUG_IN = f"{StrategyPlugin.__module__}:{StrategyPlugin.__qualname__}"
FROM_VIEWS = f"{StrategyFromViews.__module__}:{StrategyFromViews.__qualname__}"
NAME_ONE = "name a strategy with --strategy"

class Submitted(NamedTuple):
    """A plan from outside, as an engine took it."""

    plan: ExecutionPlan
    checks_drafts: bool
    comm_backends: dict[str, tuple[str, ...]]


class _Handle(NamedTuple):
    """Answers of an engine to its executor. No decision depends on those that a log does not have."""

    checks_drafts: bool
    comm_backends: dict[str, tuple[str, ...]]
    is_recording: bool = False

    def transfer_state(self, request_id: RequestId) -> str:
        return ""

    def block_counts(self) -> BlockCounts:
        return BlockCounts(0, 0, 0, 0)


# By a line `step`, by a line `end`, by a line `submit`, and by a line `cancel` (the id of the plan).
Told = StepResult | RequestId | Submitted | str


@dataclass(slots=True)
class ScheduleReport(Checked):
    """Attributes:
    strategies: who was asked, in the order of their processes in the log.
    num_decisions: questions that were asked again; of these `num_left` were left to the engine, and of `num_unsent` no step
        came.
    num_steps, num_ends, num_plans: what the executor was told between.
    """

    strategies: tuple[str, ...] = ()
    num_decisions: int = 0
    num_left: int = 0
    num_unsent: int = 0
    num_steps: int = 0
    num_ends: int = 0
    num_plans: int = 0

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            **Checked.to_dict(self), "strategies": list(self.strategies), "decisions": self.num_decisions,
            "left_to_engine": self.num_left, "unsent": self.num_unsent, "steps": self.num_steps, "ends": self.num_ends,
            "plans": self.num_plans,
        }  # fmt: skip


@dataclass(slots=True)
class _Process:
    """One process that wrote to the log. `plugins`: of its engine, once there was an `open`; `asked`: from its first decision
    on."""

    next_number: int | None = None
    plugins: list[Any] | None = None
    asked: StrategyPlugin | None = None
    policy: str = ""
    num_differences: int = 0
    is_closed: bool = False


def verify_schedule(
    path: Path | str, strategy: str | None = None, options: dict[str, Any] | None = None, *, max_differences: int = 1000
) -> ScheduleReport:
    """Args: `strategy`, `options`: whom to ask, in place of who the log says it was.

    Raises:
        TraceError: an unreadable file, a malformed line (with its number), no decision in it, or one of a plug-in that is no
            strategy alone.
        PlanError: the strategy cannot be built.
    """
    report, reader = ScheduleReport(str(path)), DecisionReader()
    processes: dict[Any, _Process] = {}
    # Events before a process's first decision are passed to its strategy too, which is known only then.
    early: dict[Any, list[tuple[int, Told]]] = {}
    for number, line in record_lines(Path(path), report):
        pid, event = line.get("pid"), line["event"]
        try:
            if type(pid) not in (int, str, type(None)):
                raise Broken(f"pid is {shortened(pid)}; a number was expected.")
            process = processes.setdefault(pid, _Process())
            process.next_number = check_number(process.next_number, number, line, report)
            process.is_closed = event == "close"
            if event == "open":
                process.plugins, process.asked, early[pid] = plugins_of(line), None, []
            elif event == "schedule":
                if process.plugins is None:
                    raise Broken("it comes before any open line, which says who decides; give a log from its beginning.")
                _same_policy(process, line)
                if process.asked is None:
                    process.asked, name = _who(process, strategy, options)
                    report.strategies += (name,)
                    for earlier in early.pop(pid):
                        _tell(process, *earlier, report)
                if process.num_differences < max_differences:
                    _ask(process, number, line, reader, report)
            elif event in TOLD and process.plugins is not None:
                told = TOLD[event](line)
                if process.asked is None:
                    early[pid].append((number, told))
                elif process.num_differences < max_differences:
                    _tell(process, number, told, report)
        except Broken as error:
            raise TraceError(f"{path}, line {number}: {event}: {error}") from error
    report.num_open = sum(process.asked is not None and not process.is_closed for process in processes.values())
    if not report.num_decisions:
        raise TraceError(f"{path} holds no schedule line; record an engine that runs with a strategy (--strategy).")
    return report


def _same_policy(process: _Process, line: dict[str, Any]) -> None:
    policy = member(line, "policy")
    if process.asked is None:
        process.policy = policy
    elif policy != process.policy:
        raise Broken(f"policy is {shortened(policy)}, and was {shortened(process.policy)}; one plug-in decides in an engine.")


def _who(process: _Process, strategy: str | None, options: dict[str, Any] | None) -> tuple[StrategyPlugin, str]:
    """Whom to ask, and its name. Raises Broken, PlanError."""
    if process.policy == FROM_VIEWS:
        raise Broken("an engine decided whose record tells no steps and no ends, so its strategy cannot be told them again.")
    if strategy is not None:
        return StrategyPlugin(strategy, options, record="none"), strategy
    for spec in process.plugins or ():
        given = spec.get("options")
        if spec.get("name") == process.policy == PLUG_IN and type(given) is dict and type(given.get("strategy")) is str:
            return StrategyPlugin(**{**given, "record": "none"}), given["strategy"]
    raise Broken(f"{shortened(process.policy)} decided, which is no strategy of this log's open line alone; {NAME_ONE}.")


def _ask(process: _Process, number: int, line: dict[str, Any], reader: DecisionReader, report: ScheduleReport) -> None:
    recorded = reader.read(line)
    report.num_decisions += 1
    report.num_left += recorded.decision is None
    report.num_unsent += recorded.phase is None
    # As in the engine, where what a strategy answers is checked before it counts.
    try:
        replayed = check_schedule(process.asked.schedule(recorded.view), recorded.view)
    except Exception as error:
        _note(process, report, Difference(number, "schedule", "", _choice(recorded.decision), _raised(error)))
        return
    ours, theirs = _choice(recorded.decision), _choice(replayed)
    if (recorded.decision is None) != (replayed is None):
        _note(process, report, Difference(number, "schedule", "choice", ours, theirs))
        return
    for name in dict.fromkeys([*ours, *theirs]):
        if ours.get(name) != theirs.get(name):
            _note(process, report, Difference(number, "schedule", name, ours.get(name), theirs.get(name)))


def _tell(process: _Process, number: int, told: Told, report: ScheduleReport) -> None:
    asked = process.asked
    try:
        if isinstance(told, StepResult):
            report.num_steps += 1
            asked.on_step_end(told)
        elif isinstance(told, Submitted):
            report.num_plans += 1
            asked.attach(_Handle(told.checks_drafts, told.comm_backends))
            asked.take_plan(told.plan)
        elif isinstance(told, str):
            asked.cancel(told)
        else:
            report.num_ends += 1
            asked.on_request_end(told)
    except Exception as error:
        _note(process, report, Difference(number, type(told).__name__, "", None, _raised(error)))


def _note(process: _Process, report: ScheduleReport, difference: Difference) -> None:
    process.num_differences += 1
    report.differences.append(difference)


def _raised(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _choice(decision: ScheduleDecision | None) -> dict[str, Any]:
    """As JSON has it: what was read and what was made now have the same types."""
    if decision is None:
        return {"choice": LEFT}
    return json.loads(json.dumps({
        "order": None if decision.order is None else list(decision.order), "hold": sorted(decision.hold),
        "token_budget": decision.token_budget, "wanted": decision.phase, "chunk_tokens": dict(decision.chunk_tokens),
        "reason": decision.reason, "reasons": dict(decision.reasons), "collectives": list(map(list, decision.collectives)),
    }))  # fmt: skip


def _submitted(line: dict[str, Any]) -> Submitted:
    backends = line.get("comm_backends", {})  # records of versions before 0.2 have none
    if type(backends) is not dict or not all(type(each) is list for each in backends.values()):
        raise Broken(f"comm_backends is {shortened(backends)}; an object of lists was expected.")
    known = {name: tuple(map(str, each)) for name, each in backends.items()}
    try:
        plan = ExecutionPlan.from_json(json.dumps(member(line, "plan")))
        return Submitted(plan, member(line, "checks_drafts") is True, known)
    except PlanError as error:
        raise Broken(str(error)) from None


def _ended(line: dict[str, Any]) -> RequestId:
    return RequestId(whole(member(line, "request"), "request", MAX_KEY))


def _result(line: dict[str, Any]) -> StepResult:
    """Raises Broken."""
    if "end_s" not in line:
        raise Broken("it has no end_s; record the run with this version, which writes all that a strategy is told.")
    phase, refused = member(line, "phase"), line.get("refused", {})
    if phase not in ("prefill", "decode"):
        raise Broken(f"phase is {shortened(phase)}; prefill or decode was expected.")
    if type(refused) is not dict or not all(key.isascii() and key.isdigit() for key in refused):
        raise Broken(f"refused is {shortened(refused)}; an object by request was expected.")
    number, requests, tokens, context, bytes_in, bytes_out = (
        whole(member(line, name), name, MAX_KEY)
        for name in ("step", "requests", "tokens", "context", "bytes_in", "bytes_out")
    )
    end_s, duration_s, swap_s = (seconds(member(line, name), name, 1.0) for name in ("end_s", "seconds", "swap_seconds"))
    return StepResult(
        number, Phase(phase), requests, tokens, end_s, duration_s, context, bytes_in, bytes_out, swap_s,
        computed_rows(member(line, "computed")), tuple([(int(key), str(why)) for key, why in refused.items()]),
    )  # fmt: skip


TOLD: dict[str, Callable[[dict[str, Any]], Told]] = {
    "step": _result, "end": _ended, "submit": _submitted, "cancel": lambda line: str(member(line, "plan_id")),
}  # fmt: skip
