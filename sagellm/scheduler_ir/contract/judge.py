"""Stands between a queue and a strategy: holds every answer against the rules, and puts right what breaks one."""

import math
from collections.abc import Callable
from operator import index
from typing import Any, NoReturn

from sagellm.core.contract import Broke
from sagellm.core.hooks import Phase, RequestId, RequestView, ScheduleDecision, StepResult, StepView
from sagellm.scheduler_ir.strategies.base import SchedulingStrategy

__all__ = ["HOLD_LIMIT_S", "Judge"]

HOLD_LIMIT_S = 60.0  # as the engine's: who is held or not admitted for longer counts as starved
SHORT_HOLD_S = 1.0  # for the rest of a scenario in which somebody starved: it has been told, and the others shall go on soon


class Judge(SchedulingStrategy):
    """A strategy for a queue that asks another one. A broken rule is reported by its name and repaired, so that the same
    scenario can find other faults.

    Args:
        report: called with the name of a rule and what was got and what is allowed.
        renew: whether each view is made of objects that were never seen before, or of the very same ones where they are equal.
    """

    name = "judge"

    def __init__(self, strategy: SchedulingStrategy, report: Callable[[str, str], None], renew: bool = False) -> None:
        self.decisions: list[tuple] = []
        self.num_events = 0
        self.seen: set[str] = set()  # rules that could have been broken
        self._strategy, self._report, self._renew = strategy, report, renew
        self._kept: dict[RequestId, RequestView] = {}
        self._last: tuple[ScheduleDecision, tuple] | None = None
        self._held_since: dict[RequestId, float] = {}
        self._hold_limit_s = HOLD_LIMIT_S

    def decide(self, view: StepView) -> ScheduleDecision:
        view = view._replace(requests=tuple([self._as_seen(request) for request in view.requests]))
        answer = self._call("decide", view)
        self.seen |= {"raises_nothing", "answer", "amounts"}
        self._look_back()
        if answer is None:
            self.seen |= {"names_all", "names_once", "names_known", "reasons", "unchanged"}  # it named and changed nothing
            self.decisions.append(())
            return ScheduleDecision()
        if not isinstance(answer, ScheduleDecision):
            self._report("answer", f"decide returned {answer!r}; return a ScheduleDecision or None.")
            return ScheduleDecision()
        try:
            plain, decision = _plain(answer), self._judge(answer, view)
        except (TypeError, ValueError, AttributeError) as error:
            self._report("answer", f"{answer!r} makes no sense ({error}); ScheduleDecision says what each part may be.")
            return ScheduleDecision()
        self._last = (answer, plain)
        self.decisions.append(plain)
        return decision

    def on_step_end(self, result: StepResult) -> None:
        self._call("on_step_end", result)

    def on_request_end(self, request_id: RequestId) -> None:
        self._kept.pop(request_id, None)
        self._held_since.pop(request_id, None)
        self._call("on_request_end", request_id)

    def _judge(self, answer: ScheduleDecision, view: StepView) -> ScheduleDecision:
        ids = [request.request_id for request in view.requests]
        order = self._order(answer.order, ids)
        hold = set(self._known("hold", answer.hold, ids))
        for request in view.requests:
            if self._is_held_too_long(request.request_id, request.request_id in hold, view.now_s):
                hold.discard(request.request_id)
        chunks = self._known("chunk_tokens", answer.chunk_tokens, ids)
        counts = {name: self._count("a chunk of", answer.chunk_tokens[name]) for name in chunks}
        chunk_tokens = {name: count for name, count in counts.items() if count is not None}
        budget = answer.token_budget
        if budget is not None:
            budget = self._count("a token budget of", budget)
        if answer.phase is not None and not isinstance(answer.phase, Phase):
            self._report("answer", f"phase {answer.phase!r}; give Phase.PREFILL, Phase.DECODE or None.")
            return ScheduleDecision(order)
        self._known("reasons", answer.reasons, ids)
        for reason in (answer.reason, *answer.reasons.values()):
            self.seen.add("reasons")
            if not isinstance(reason, str):
                self._report("reasons", f"reason {reason!r}; give a text.")
        return ScheduleDecision(order, frozenset(hold), budget, "", answer.phase, chunk_tokens)

    def _order(self, order: Any, ids: list[RequestId]) -> list[RequestId]:
        if ids:
            self.seen |= {"names_all", "names_once", "names_known"}
        if order is None:
            return ids
        names = [int(name) for name in order]
        if foreign := sorted(set(names) - set(ids)):
            self._report("names_known", f"order names {foreign[:5]}, which are not in this step; name those of the view.")
        if len(set(names)) < len(names):
            twice = sorted({name for name in names if names.count(name) > 1})
            self._report("names_once", f"order names {twice[:5]} more than once; name each once.")
        if missing := [name for name in ids if name not in set(names)]:
            self._report("names_all", f"order lacks {missing[:5]}; name every request of the view.")
        good = [name for name in dict.fromkeys(names) if name in set(ids)]
        return [RequestId(name) for name in (*good, *missing)]

    def _known(self, where: str, named: Any, ids: list[RequestId]) -> list[RequestId]:
        if foreign := [name for name in named if name not in ids]:
            self._report("names_known", f"{where} names {foreign[:5]}, which are not in this step.")
        return [name for name in named if name in ids]

    def _count(self, what: str, value: Any) -> int | None:
        try:
            number = index(value)
        except TypeError:
            number = 0
        if number < 1 or isinstance(value, bool):
            self._report("amounts", f"{what} {value!r}; give a whole number from 1.")
            return None
        return number

    def _is_held_too_long(self, request_id: RequestId, is_held: bool, now_s: float) -> bool:
        """Whether it has been for so long that it goes on all the same."""
        if not is_held:
            self._held_since.pop(request_id, None)
            return False
        if now_s - self._held_since.setdefault(request_id, now_s) <= self._hold_limit_s or not math.isfinite(now_s):
            return False
        if self._hold_limit_s < HOLD_LIMIT_S:
            return True
        self._hold_limit_s = SHORT_HOLD_S
        self._report("completes", f"request {request_id} was held for {HOLD_LIMIT_S:g} s; let each run some time.")
        return True

    def _look_back(self) -> None:
        """A record may be written later: what was answered stays as it was."""
        if self._last is None:
            return
        self.seen.add("unchanged")
        answer, plain = self._last
        if _plain(answer) != plain:
            self._report("unchanged", "an earlier decision was changed; make a new one, with a new list, each time.")

    def _as_seen(self, request: RequestView) -> RequestView:
        if self._renew:
            return _fresh(request)
        if (kept := self._kept.get(request.request_id)) == request:
            return kept
        self._kept[request.request_id] = request
        return request

    def _call(self, what: str, *arguments: Any) -> Any:
        self.num_events += 1
        try:
            return getattr(self._strategy, what)(*arguments)
        except (Exception, SystemExit) as error:
            self._broke(what, error)

    def _broke(self, what: str, error: BaseException) -> NoReturn:
        self.seen.add("raises_nothing")
        self._report("raises_nothing", f"{what} raised {type(error).__name__}: {error}; it has to answer.")
        raise Broke from error


def _fresh(request: RequestView) -> RequestView:
    """An equal one of objects of its own; small numbers and one-letter texts Python shares among all."""
    service = request.service
    return RequestView(
        RequestId(int(str(request.request_id))), Phase(request.phase.value), *(int(str(number)) for number in request[2:6]),
        request.arrival_s, "".join(list(request.adapter)), service._replace(tenant_id="".join(list(service.tenant_id))),
        *request[9:],
    )  # fmt: skip


def _plain(answer: ScheduleDecision) -> tuple:
    order = None if answer.order is None else tuple(int(name) for name in answer.order)
    return (
        order, tuple(sorted(answer.hold)), answer.token_budget, answer.reason, answer.phase,
        tuple(sorted(answer.chunk_tokens.items())), tuple(sorted(answer.reasons.items())),
    )  # fmt: skip
