"""Logs made by hand."""

import json

from sagellm.core.events import FORMAT
from sagellm.core.hooks import Phase
from sagellm.replay.schedule.base import RecordedRequest
from sagellm.replay.schedule.service import asked_of
from tests.scheduler_ir.simulation.made import SHAPE


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
