"""LMDeploy's scheduler on the virtual clock: who waits, runs or is on the device, and who is taken into the next step.

Source: LMDeploy 0.11.0, pytorch/paging/scheduler.py and pytorch/engine/engine.py, whose rules these are.
"""

from operator import attrgetter

from sagellm.core.hooks import RequestId, ScheduleDecision
from sagellm.scheduler_ir.simulation.base import EngineShape
from sagellm.scheduler_ir.simulation.pool import BlockPool
from sagellm.scheduler_ir.simulation.requests import VirtualRequest

__all__ = ["Queues"]

MANY_WAITING = 4  # with so many LMDeploy computes prompts next, however many run
NOT_FIRST = "its prompt is not cut: it is not the first of its step"
NO_DECISION = ScheduleDecision()

_by_arrival = attrgetter("arrival_s", "request_id")


class Queues:
    """`waiting` in the order in which they came to wait; `running` may join a decode step; `in_flight` are on the device.

    `refused`: of the step that was taken last, what a decision asked for and LMDeploy could not do.
    """

    def __init__(self, shape: EngineShape) -> None:
        self._shape = shape
        self.pool = BlockPool(shape)
        self.waiting: list[VirtualRequest] = []
        self.running: list[VirtualRequest] = []
        self.in_flight: list[VirtualRequest] = []
        self.num_preempted = 0
        self.refused: list[tuple[RequestId, str]] = []

    def wants_prefill(self) -> bool:
        """The engine's own choices. Requests in flight do not count as running."""
        if not self.waiting:
            return False
        return len(self.waiting) >= MANY_WAITING or len(self.running) < self._shape.max_batch_size * 0.5

    def may_send_ahead(self, is_prefill: bool, is_decoding: bool) -> bool:
        """Whether the engine chooses a further step while one is on the device. `is_prefill`: whether its own choice would be
        prompts; `is_decoding`: whether that one decodes."""
        threshold = self._shape.max_batch_size // 4 if is_decoding else 0
        return is_prefill or len(self.running) > threshold

    def by_arrival(self, requests: list[VirtualRequest]) -> list[VirtualRequest]:
        return sorted(requests, key=_by_arrival)

    def take_prefill(self, decision: ScheduleDecision | None) -> list[VirtualRequest]:
        """Requests of a step of prompts, which then are `running`; empty if there is no room for one, or none may join."""
        room = self._shape.max_batch_size - len(self.running) - len(self.in_flight)
        self.refused = []
        if room <= 0 or not self.waiting:
            return []
        decision = decision or NO_DECISION
        limit = self._shape.max_prefill_tokens
        if decision.token_budget is not None:
            limit = min(limit, decision.token_budget)
        queue = self._ordered(list(self.waiting), decision)
        taken: list[VirtualRequest] = []
        num_tokens = 0
        while queue and len(taken) < room:
            request = queue.pop(0)
            if taken and num_tokens + request.num_left > limit:
                break
            found_before = request.num_computed, request.num_blocks
            self.pool.find(request)
            if not self._make_room(request, 0, queue[::-1]):
                if found_before == (0, 0):
                    self.pool.release(request)  # what it found waits in the cache
                break
            self.pool.hold(request, self.pool.num_needed(request, 0))
            request.has_run = True
            chunk = decision.chunk_tokens.get(request.request_id)
            request.chunk = None
            if chunk is not None and chunk < request.num_left:
                if taken:
                    self.refused.append((request.request_id, NOT_FIRST))
                else:
                    request.chunk = chunk
            self.waiting.remove(request)
            self.running.append(request)
            taken.append(request)
            num_tokens += request.chunk or request.num_left
        return taken

    def take_decode(self, decision: ScheduleDecision | None) -> list[VirtualRequest]:
        """Requests of the next round of decode steps. For lack of blocks those at the end go back to wait."""
        self.refused = []
        decision = decision or NO_DECISION
        ahead = self._shape.decode_round
        order = self._ordered(self.running, decision)
        if decision.token_budget is not None:
            order = order[: decision.token_budget]
        taken = []
        while order:
            request = order.pop(0)
            needed = self.pool.num_needed(request, ahead)
            while not self._make_room(request, ahead, self.waiting[::-1]):
                if not order:
                    break
                self._preempt(order.pop())
            if self.pool.num_free < needed:
                self._preempt(request)
                continue
            self.pool.hold(request, needed)
            taken.append(request)
        return taken

    def _ordered(self, requests: list[VirtualRequest], decision: ScheduleDecision) -> list[VirtualRequest]:
        requests = self.by_arrival([each for each in requests if each.request_id not in decision.hold])
        if decision.order is not None:
            place = {request: number for number, request in enumerate(decision.order)}
            requests.sort(key=lambda each: place[each.request_id])
        return requests

    def _preempt(self, request: VirtualRequest) -> None:
        """It waits again, and keeps its blocks until somebody needs them."""
        self.running.remove(request)
        self.waiting.append(request)
        self.num_preempted += 1

    def _make_room(self, request: VirtualRequest, ahead: int, evictable: list[VirtualRequest]) -> bool:
        """Whether there are blocks for it, once those of `evictable`, first to last, and cached prefixes have gone."""
        pool = self.pool
        needed = pool.num_needed(request, ahead)
        if pool.num_free >= needed:
            return True
        for other in evictable:
            if other.num_blocks:
                pool.release(other)
                pool.evict_cached(needed - pool.num_free)
                if pool.num_free >= needed:
                    return True
        pool.evict_cached(needed - pool.num_free)
        return pool.num_free >= needed

    # ---- a step on its way

    def send(self, taken: list[VirtualRequest]) -> None:
        for request in taken:
            self.running.remove(request)
        self.in_flight.extend(taken)

    def leave(self, request: VirtualRequest) -> None:
        """It is complete or cancelled, also in the middle of a round; its full blocks stay cached."""
        for queue in (self.in_flight, self.running, self.waiting):
            if request in queue:
                queue.remove(request)
                break
        self.pool.release(request)

    def back(self, taken: list[VirtualRequest]) -> None:
        """The step of these is over: who was cut waits, who has not left runs."""
        for request in taken:
            if request.has_ended:
                continue
            self.in_flight.remove(request)
            (self.running if request.chunk is None else self.waiting).append(request)
            request.chunk = None
