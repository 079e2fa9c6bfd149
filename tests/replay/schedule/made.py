"""Logs and strategies made by hand."""

import json

from sagellm.core.events import FORMAT
from sagellm.core.hooks import Phase, ScheduleDecision
from sagellm.replay.schedule.base import EngineShape, RecordedRequest
from sagellm.replay.schedule.service import asked_of
from sagellm.replay.schedule.step_times import StepTimes
from sagellm.scheduler_ir.strategies.base import SchedulingStrategy

SHAPE = EngineShape(block_size=4, num_blocks=1000, max_prefill_tokens=100, max_batch_size=8, prefix_caching=False)
# A second and 10 ms a token; half a second whoever decodes.
TIMES = StepTimes((1.0, 0.01, 0.0), (0.5, 0.0, 0.0))


def request(number, arrival_s, prompt, generated, **fields):
    return RecordedRequest(number, arrival_s, prompt, generated, **fields)


def open_fields(shape=SHAPE, **fields):
    return dict(
        event="open", format=FORMAT, block_size=shape.block_size, num_blocks=shape.num_blocks,
        max_prefill_tokens=shape.max_prefill_tokens, max_batch_size=shape.max_batch_size,
        prefix_caching=shape.prefix_caching, plugins=[],
    ) | fields  # fmt: skip


def text_of(events):
    """(seconds, fields) of each line."""
    rows = [
        {"t_ns": round(time_s * 1e9) + 10**9, "n": number, "pid": 7, **fields}
        for number, (time_s, fields) in enumerate(events)
    ]
    return "".join(json.dumps(row) + "\n" for row in rows)


def log_of(requests, run, shape=SHAPE, tells_rows=True):
    """The log that an engine with this run would have written. Not for runs with preemptions."""
    by_id = {each.request_id: each for each in requests}
    events = [(0.0, 0, open_fields(shape, decode_round=shape.decode_round))]
    for each in requests:
        asked = asked_of(each.service, each.arrival_s)
        fields = dict(
            event="arrive", request=each.request_id, tokens=each.prompt_tokens, max_new=each.max_new_tokens, namespace="",
            tenant=each.service.tenant_id, **({"service": asked} if asked else {}),
        )  # fmt: skip
        events.append((each.arrival_s, 1, fields))
    seen = set()
    for step in run.steps:
        for number, _ in step.computed:
            if step.phase is Phase.PREFILL and number not in seen:
                seen.add(number)
                cached = by_id[number].cached_tokens
                fields = dict(event="lookup", request=number, tokens=by_id[number].prompt_tokens, matched=cached)
                events.append((step.end_s - step.seconds, 2, fields))
        fields = dict(
            event="step", step=step.step, phase=step.phase.value, requests=step.num_requests, tokens=step.num_tokens,
            context=0 if step.phase is Phase.PREFILL else round(step.attention), seconds=step.seconds,
        )  # fmt: skip
        events.append((step.end_s, 3, fields | ({"computed": step.computed} if tells_rows else {})))
    for each in run.requests:
        fields = dict(event="end", request=each.request_id, generated=each.num_tokens, reason="length")
        events.append((each.last_token_s, 4, fields))
    events.sort(key=lambda event: event[:2])
    return text_of((time_s, fields) for time_s, _, fields in events)


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
    """Whatever `answer(view)` gives."""

    def __init__(self, answer=lambda view: None):
        self.answer, self.ended = answer, []

    def decide(self, view):
        return self.answer(view)

    def on_request_end(self, request_id):
        self.ended.append(request_id)
