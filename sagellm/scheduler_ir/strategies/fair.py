"""Fair sharing among tenants: each has a counter of the service it got, the least served goes first."""

import heapq
from collections import Counter, OrderedDict, deque

from sagellm.core.hooks import Phase, RequestId, RequestView, ScheduleDecision, StepResult, StepView
from sagellm.scheduler_ir.strategies.base import SchedulingStrategy
from sagellm.scheduler_ir.strategies.options import check_number
from sagellm.scheduler_ir.strategies.ordering import unfinished_tokens

__all__ = ["Fair"]

MAX_ABSENT = 1000  # tenants without requests whose counters are kept; names may be without end


class Fair(SchedulingStrategy):
    """A virtual token counter for each tenant, charged with what was computed: `input_weight` for a token of a prompt,
    `output_weight` for one that was generated. Tokens that are computed again after a preemption are charged again.

    The next request is one of the tenant with the smallest counter, the first of it to arrive; each that is chosen counts at
    once in the order of the rest. Memory is taken from the tenant with the largest counter. A tenant that comes back begins at
    least where the least served one of those that wait stands, as soon as it waits itself, so that absence saves up nothing;
    if none waits, at the counter of the one that stopped waiting last. A tenant that only decodes is no measure: a long
    stream is served
    little by little, and newcomers that begin where it stands would go before all others. Requests without a tenant have one
    account; of absent tenants the latest 1,000 counters are kept.

    Source: Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024, whose weights 1 and 2 are the defaults.

    Args:
        input_weight, output_weight: from 0, not both 0.
    """

    name = "fair"

    def __init__(self, *, input_weight: float = 1.0, output_weight: float = 2.0) -> None:
        self._input = check_number(self.name, "input_weight", input_weight, 0)
        least = 1e-6 if self._input == 0 else 0
        self._output = check_number(self.name, "output_weight", output_weight, least)
        self._counters: dict[str, float] = {}
        self._absent: OrderedDict[str, None] = OrderedDict()  # tenants with a counter and no request, the latest last
        self._tenant_of: dict[RequestId, str] = {}
        self._num_requests: Counter[str] = Counter()
        self._waiting: set[RequestId] = set()  # as last seen: one whose chunk is on the device waits still
        self._num_waiting: Counter[str] = Counter()
        self._last_left = ""  # the tenant that stopped waiting last

    def decide(self, view: StepView) -> ScheduleDecision:
        for request in view.requests:
            if request.request_id not in self._tenant_of:
                self._enter(request)
            if request.phase is Phase.DECODE:
                self._stop_waiting(request.request_id)
        self._begin_waiting(view.waiting)
        waiting = self._in_turn(view.waiting)
        running = sorted(view.running, key=lambda request: (self._counters[self._of(request)], request.arrival_s))
        order = [request.request_id for request in (*waiting, *running)]
        first = self._of(waiting[0]) if waiting else ""
        reason = f"tenant {first!r} got least: {self._counters[first]:.0f}" if waiting else "no request waits"
        return ScheduleDecision(order, reason=reason)

    def on_step_end(self, result: StepResult) -> None:
        is_prefill = result.phase is Phase.PREFILL
        for request_id, tokens in result.computed:
            tenant = self._tenant_of.get(request_id)
            if tenant is not None:
                self._counters[tenant] += tokens * (self._input if is_prefill else self._output)

    def on_request_end(self, request_id: RequestId) -> None:
        self._stop_waiting(request_id)
        tenant = self._tenant_of.pop(request_id, None)
        if tenant is None:
            return
        self._num_requests[tenant] -= 1
        if not self._num_requests[tenant]:
            del self._num_requests[tenant]
            self._absent[tenant] = None
            if len(self._absent) > MAX_ABSENT:
                del self._counters[self._absent.popitem(last=False)[0]]

    def report(self) -> dict[str, float]:
        """The counters of tenants that have requests."""
        return {f"counter_{tenant}": self._counters[tenant] for tenant in self._num_requests}

    def _of(self, request: RequestView) -> str:
        return self._tenant_of[request.request_id]

    def _enter(self, request: RequestView) -> None:
        tenant = request.service.tenant_id
        self._absent.pop(tenant, None)
        self._counters.setdefault(tenant, 0.0)
        self._num_requests[tenant] += 1
        self._tenant_of[request.request_id] = tenant

    def _begin_waiting(self, waiting: tuple[RequestView, ...]) -> None:
        """Raise tenants without waiting requests to the least served one of those that waited before."""
        new = [request for request in waiting if request.request_id not in self._waiting]
        if not new:
            return
        present = [self._counters[tenant] for tenant in self._num_waiting]
        least = min(present) if present else self._counters.get(self._last_left, 0.0)
        for request in new:
            tenant = self._of(request)
            if tenant not in self._num_waiting:
                self._counters[tenant] = max(self._counters[tenant], least)
            self._num_waiting[tenant] += 1
            self._waiting.add(request.request_id)

    def _stop_waiting(self, request_id: RequestId) -> None:
        if request_id not in self._waiting:
            return
        self._waiting.remove(request_id)
        tenant = self._tenant_of[request_id]
        self._num_waiting[tenant] -= 1
        if not self._num_waiting[tenant]:
            del self._num_waiting[tenant]
            self._last_left = tenant

    def _in_turn(self, waiting: tuple[RequestView, ...]) -> list[RequestView]:
        """By counters that grow as requests are chosen. O(n log n)."""
        queues: dict[str, deque[RequestView]] = {}
        for request in sorted(waiting, key=lambda request: request.arrival_s):
            queues.setdefault(self._of(request), deque()).append(request)
        heap = [(self._counters[tenant], place, tenant) for place, tenant in enumerate(queues)]
        heapq.heapify(heap)
        ordered = []
        while heap:
            counter, place, tenant = heap[0]
            request = queues[tenant].popleft()
            ordered.append(request)
            if queues[tenant]:
                charge = unfinished_tokens(request) * self._input + self._output
                heapq.heapreplace(heap, (counter + charge, place, tenant))
            else:
                heapq.heappop(heap)
        return ordered
