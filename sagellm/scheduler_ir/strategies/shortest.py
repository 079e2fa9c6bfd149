"""Shortest predicted work first, with ageing: lengths of answers are learned by tenant and length of the prompt."""

from collections import OrderedDict

from sagellm.core.hooks import Phase, RequestId, RequestView, ScheduleDecision, StepResult, StepView
from sagellm.core.step_times import StepTimes
from sagellm.scheduler_ir.strategies.base import SchedulingStrategy
from sagellm.scheduler_ir.strategies.options import check_count, check_number
from sagellm.scheduler_ir.strategies.ordering import smallest_first, unfinished_tokens

__all__ = ["Shortest"]

MAX_KINDS = 4096  # of requests whose mean is kept; the one that ended longest ago goes
RECENT = 32  # answers over which a mean looks back, about

Kind = tuple[str, int]  # tenant, binary logarithm of the prompt's length


class Shortest(SchedulingStrategy):
    """Least predicted seconds left first: its prefill, and as many decode steps as answers of its kind had so far.

    A kind is a tenant and a power of two of prompt tokens; before it has ended one request, half of `max_new_tokens` is
    assumed. Ageing: a second of waiting is worth `ageing` seconds of work, so a request with w seconds of work goes behind
    those alone that arrive less than w / `ageing` seconds later. The means count cancelled requests as complete.

    Source: shortest remaining processing time, on predictions. Args: `ageing`: from 0.001; `unknown_tokens`: of an answer
    about which nothing is known, from 1.
    """

    name = "shortest"

    def __init__(self, *, ageing: float = 0.2, unknown_tokens: int = 256) -> None:
        self.times = StepTimes()
        self._ageing = check_number(self.name, "ageing", ageing, 1e-3)
        self._unknown = check_count(self.name, "unknown_tokens", unknown_tokens, 1)
        self._means: OrderedDict[Kind, tuple[float, int]] = OrderedDict()  # mean, and of how many
        self._running: dict[RequestId, list] = {}  # kind and tokens generated so far

    def decide(self, view: StepView) -> ScheduleDecision:
        for request in view.requests:
            seen = self._running.get(request.request_id)
            if seen is None:
                prompt = max(request.num_tokens - request.num_generated, 1)
                seen = self._running[request.request_id] = [(request.service.tenant_id, prompt.bit_length()), 0]
            seen[1] = max(seen[1], request.num_generated)
        token_s = self.times.decode_s(max(len(view.running), 1))
        return smallest_first(
            view, lambda request: request.arrival_s * self._ageing + self._left_s(request, token_s),
            "least predicted work", True,
        )  # fmt: skip

    def predict(self, request: RequestView) -> float:
        """Tokens of its whole answer, at least those that are there and one more."""
        kind = self._running[request.request_id][0]
        most = request.max_new_tokens
        mean = self._means[kind][0] if kind in self._means else (most / 2 if most else self._unknown)
        return max(min(mean, most) if most else mean, request.num_generated + 1)

    def on_step_end(self, result: StepResult) -> None:
        self.times.observe(result)
        if result.phase is Phase.DECODE:
            for request_id, _ in result.computed:
                if request_id in self._running:
                    self._running[request_id][1] += 1

    def on_request_end(self, request_id: RequestId) -> None:
        kind, generated = self._running.pop(request_id, (None, 0))
        if kind is None:
            return
        mean, count = self._means.pop(kind, (0.0, 0))
        count = min(count + 1, RECENT)
        self._means[kind] = (mean + (generated - mean) / count, count)
        if len(self._means) > MAX_KINDS:
            self._means.popitem(last=False)

    def report(self) -> dict[str, float]:
        return {"kinds": len(self._means), **self.times.report()}

    def _left_s(self, request: RequestView, token_s: float) -> float:
        left_s = (self.predict(request) - request.num_generated) * token_s
        if request.phase is Phase.PREFILL:
            left_s += self.times.prefill_s(unfinished_tokens(request), max(request.num_computed, 0))
        return left_s
