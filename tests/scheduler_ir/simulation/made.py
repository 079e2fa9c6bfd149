"""Requests and strategies made by hand for the virtual engine."""

from sagellm.core.hooks import Phase, ScheduleDecision
from sagellm.scheduler_ir.simulation.base import EngineShape, LinearCosts
from sagellm.scheduler_ir.simulation.requests import VirtualRequest
from sagellm.scheduler_ir.strategies.base import SchedulingStrategy

SHAPE = EngineShape(block_size=4, num_blocks=1000, max_prefill_tokens=100, max_batch_size=8, prefix_caching=False)
# A step of prompts takes a second and 10 ms a token. A decode step takes half a second, with any requests.
COSTS = LinearCosts((1.0, 0.01, 0.0), (0.5, 0.0, 0.0))


def request(number, arrival_s, prompt, generated, **fields):
    return VirtualRequest(number, arrival_s, prompt, generated, **fields)


class Fifo(SchedulingStrategy):
    def decide(self, view):
        order = [each.request_id for each in sorted(view.requests, key=lambda each: (each.arrival_s, each.request_id))]
        return ScheduleDecision(order, reason="who came first")


class LastFirst(SchedulingStrategy):
    def decide(self, view):
        order = [each.request_id for each in sorted(view.requests, key=lambda each: -each.arrival_s)]
        return ScheduleDecision(order, reason="who came last", reasons={order[0]: "the youngest"})


class Cuts(SchedulingStrategy):
    """Every prompt in parts; what comes next is the engine's choice, or in turn."""

    def __init__(self, tokens=40, in_turn=False):
        self.tokens, self.in_turn, self.results = tokens, in_turn, []
        self.last = Phase.DECODE

    def decide(self, view):
        chunks = {each.request_id: self.tokens for each in view.waiting}
        phase = None
        if self.in_turn:
            phase = Phase.PREFILL if self.last is Phase.DECODE else Phase.DECODE
        return ScheduleDecision(phase=phase, chunk_tokens=chunks)

    def on_step_end(self, result):
        self.last = result.phase
        self.results.append(result)


class Answers(SchedulingStrategy):
    """Decides what `answer(view)` returns."""

    def __init__(self, answer=lambda view: None):
        self.answer, self.ended = answer, []

    def decide(self, view):
        return self.answer(view)

    def on_request_end(self, request_id):
        self.ended.append(request_id)
