"""Tests of what is read from a log, and of the message about a log that cannot be read."""

import json
from dataclasses import replace

import pytest

from sagellm.core.errors import TraceError
from sagellm.core.hooks import Phase, ServiceLevel
from sagellm.replay.schedule.base import ENGINE
from sagellm.replay.schedule.compare import compare
from sagellm.replay.schedule.log import read_log
from sagellm.replay.schedule.session import replay_schedule
from sagellm.replay.schedule.virtual_run import virtual_run
from tests.replay.schedule.made import log_of, open_fields, request, text_of
from tests.scheduler_ir.simulation.made import COSTS, SHAPE, Cuts

ASKED = ServiceLevel(-3, "acme", deadline_s=9.0, ttft_s=0.5, tpot_s=0.25)
REQUESTS = [
    request(0, 0.0, 100, 3), request(1, 0.5, 50, 2, service=ASKED, max_new_tokens=7), request(2, 6.0, 40, 4),
    request(3, 6.25, 90, 9), request(4, 6.5, 300, 1), request(5, 40.0, 20, 5), request(6, 40.0, 30, 2),
]  # fmt: skip


def arrive(number, tokens=8, **fields):
    return dict(event="arrive", request=number, tokens=tokens, **fields)


def step(number, phase, requests, tokens, context=0, seconds=0.5, **fields):
    return dict(
        event="step", step=number, phase=phase, requests=requests, tokens=tokens, context=context, seconds=seconds, **fields
    )  # fmt: skip


def end(number, generated):
    return dict(event="end", request=number, generated=generated, reason="length")


def lookup(number, tokens=8, matched=0):
    return dict(event="lookup", request=number, tokens=tokens, matched=matched)


def read(tmp_path, text, **options):
    path = tmp_path / "log.jsonl"
    path.write_text(text)
    return read_log(path, **options)


@pytest.mark.parametrize("decode_round", [1, 4])
@pytest.mark.parametrize("kind", [None, Cuts])
def test_a_run_is_read_as_it_was(tmp_path, decode_round, kind):
    shape = replace(SHAPE, decode_round=decode_round)
    run = virtual_run(REQUESTS, shape, COSTS, kind and kind(), name="log")
    found = read(tmp_path, log_of(REQUESTS, run, shape))
    assert found.shape == shape and found.decided_by == ENGINE and not found.num_left_out
    for ours, theirs in zip(found.requests, REQUESTS, strict=True):
        assert (ours.request_id, ours.prompt_tokens, ours.num_generated) == (
            theirs.request_id, theirs.prompt_tokens, theirs.num_generated
        )  # fmt: skip
        assert ours.arrival_s == pytest.approx(theirs.arrival_s) and ours.service == pytest.approx(theirs.service)
        assert ours.max_new_tokens == theirs.max_new_tokens
    for ours, theirs in zip(found.measured.requests, run.requests, strict=True):
        assert ours.token_s == pytest.approx(theirs.token_s)
    for ours, theirs in zip(found.measured.steps, run.steps, strict=True):
        assert (ours.phase, ours.computed, ours.attention) == (theirs.phase, theirs.computed, pytest.approx(theirs.attention))


def test_what_lines_do_not_tell_is_found_out(tmp_path):
    """Without `computed`: requests of prompts by their lookups, rounds by the numbers of steps, last tokens by the end."""
    shape = replace(SHAPE, decode_round=2)
    run = virtual_run(REQUESTS, shape, COSTS, name="log")
    text = log_of(REQUESTS, run, shape, tells_rows=False).replace('"decode_round": 2', '"other": 2')
    found = read(tmp_path, text)
    assert found.shape == shape
    for ours, theirs in zip(found.measured.requests, run.requests, strict=True):
        assert (ours.first_token_s, ours.last_token_s) == pytest.approx((theirs.first_token_s, theirs.last_token_s))
    prompts = [each.computed for each in found.measured.steps if each.phase is Phase.PREFILL]
    assert prompts == [each.computed for each in run.steps if each.phase is Phase.PREFILL]


@pytest.mark.parametrize("kind", [None, Cuts])
def test_the_same_machine_predicts_itself(tmp_path, kind):
    run = virtual_run(REQUESTS, SHAPE, COSTS, kind and kind(), name="log", gap_s=0.125)
    log = read(tmp_path, log_of(REQUESTS, run))
    assert log.gap_s == pytest.approx(0.125)
    if kind is Cuts:  # the log does not say what its steps were cut by
        times = replay_schedule(log, {ENGINE: {}}).times
        agreed = compare(log.measured, virtual_run(log.requests, log.shape, times, Cuts(), gap_s=log.gap_s))
    else:
        agreed = replay_schedule(log, {ENGINE: {}}).prediction
    assert agreed.first_difference is None
    assert all(abs(error) < 1e-6 for error in agreed.errors.values())


def test_preempted_and_computed_again(tmp_path):
    """Request 0 loses its blocks after two tokens, finds one block again and has its other tokens computed."""
    rows = [
        (0.0, open_fields()), (1.0, arrive(0)), (1.0, lookup(0, 8, 4)), (2.0, step(1, "prefill", 1, 4, 4, computed=[[0, 4]])),
        (2.5, step(2, "decode", 1, 1, 8, computed=[[0, 1]])), (2.6, dict(event="preempt", request=0, tokens=10)),
        (2.6, dict(event="evict", request=0, policy="lru", reason="recompute", victims=[])), (2.7, lookup(0, 10, 4)),
        (3.5, step(3, "prefill", 1, 6, 4, computed=[[0, 6]])), (3.6, end(0, 3)),
    ]  # fmt: skip
    found = read(tmp_path, text_of(rows))
    (only,) = found.measured.requests
    assert only.token_s == pytest.approx((1.0, 1.5, 2.5)) and found.measured.num_preempted == 1
    assert found.requests[0].cached_tokens == 4
    assert [each.attention for each in found.measured.steps] == [4 * (4 + 1.5), 8, 6 * (4 + 2.5)]


def test_a_round_goes_on_after_an_end(tmp_path):
    rows = [
        (0.0, open_fields()), (1.0, arrive(0)), (1.0, lookup(0)), (2.0, step(1, "prefill", 1, 8, computed=[[0, 8]])),
        (2.5, step(2, "decode", 1, 1, 8, computed=[[0, 1]])), (3.0, step(2, "decode", 1, 1, 9, computed=[[0, 1]])),
        (3.1, end(0, 2)),
    ]  # fmt: skip
    found = read(tmp_path, text_of(rows))
    assert found.shape.decode_round == 2 and found.measured.requests[0].token_s == pytest.approx((1.0, 1.5))
    assert found.measured.requests[0].last_token_s == pytest.approx(1.5)


def test_who_got_nothing_or_did_not_end_is_left_out(tmp_path):
    rows = [
        (0.0, open_fields()), (1.0, arrive(0)), (1.0, arrive(1)), (1.0, arrive(2)), (1.0, lookup(0)), (1.0, lookup(2)),
        (1.5, end(1, 0)), (2.0, step(1, "prefill", 2, 16)), (2.0, end(0, 1)),
    ]  # fmt: skip
    found = read(tmp_path, text_of(rows))
    assert [each.request_id for each in found.requests] == [0] and found.num_left_out == 2


def decided(tmp_path, plug_in, **options):
    """A log of `Cuts` with 30 tokens, which that plug-in is said to have decided."""
    run = virtual_run(REQUESTS, SHAPE, COSTS, Cuts(30), name="log")
    lines = log_of(REQUESTS, run).splitlines(keepends=True)
    lines[0] = lines[0].replace('"plugins": []', f'"plugins": [{json.dumps(dict(name=plug_in, options=options))}]')
    lines.insert(2, json.dumps({"t_ns": 10**9, "n": 0, "pid": 7, "event": "schedule", "policy": plug_in}) + "\n")
    return read(tmp_path, "".join(lines))


CUTS = "tests.scheduler_ir.simulation.made:Cuts"


@pytest.mark.parametrize("plug_in", ["strategy_plugin:StrategyPlugin", "from_views:StrategyFromViews"])
def test_who_decided(tmp_path, plug_in):
    log = decided(tmp_path, f"sagellm.scheduler_ir.{plug_in}", strategy=CUTS, options=dict(tokens=30))
    found = replay_schedule(log, {ENGINE: {}})
    assert found.predicted_by == CUTS and found.prediction.first_difference is None
    unknown = replace(log, decided_by="elsewhere:Other", plugins=())
    assert replay_schedule(unknown, {ENGINE: {}}).prediction is None


def test_what_else_takes_a_strategy_does_more_than_that(tmp_path):
    """Plans too had a part in what a runner of plans decided."""
    runner = "sagellm.scheduler_ir.plan_runner:PlanRunner"
    found = replay_schedule(decided(tmp_path, runner, strategy=CUTS, strategy_options=dict(tokens=30)), {ENGINE: {}})
    assert found.predicted_by == runner and found.prediction is None


GOOD = [
    (0.0, open_fields()), (1.0, arrive(0)), (1.0, lookup(0)), (2.0, step(1, "prefill", 1, 8, computed=[[0, 8]])),
    (2.1, end(0, 1)),
]  # fmt: skip


@pytest.mark.parametrize(
    "place, line, words",
    [
        (1, arrive(0, 0), "tokens is 0"),
        (1, arrive("x"), "request is 'x'"),
        (1, dict(event="arrive", request=0), "has no tokens"),
        (1, arrive(0, tenant=3), "tenant is 3"),
        (1, arrive(0, service=[]), "service is []"),
        (1, arrive(0, service=dict(priority=101)), "from -100 to 100"),
        (1, arrive(0, service=dict(ttft_s=0)), "ttft_s is 0"),
        (1, arrive(0, service=dict(deadline_s="soon")), "deadline_s is 'soon'"),
        (1, arrive(0, service=dict(prio=1)), "known are priority"),
        (2, arrive(0), "arrives a second time"),
        (2, lookup(3), "request 3 has not arrived"),
        (2, lookup(0, 8, 8), "the last one is never cached"),
        (3, step(1, "both", 1, 8), "phase is 'both'"),
        (3, step(1, "prefill", 1, 8, seconds=-1), "seconds is -1"),
        (3, step(1, "prefill", 0, 0), "requests is 0"),
        (3, step(1, "prefill", 1, 8, computed=[[0, 7]]), "names 1 requests and 7 tokens"),
        (3, step(1, "prefill", 1, 8, computed=[[5, 8]]), "request 5 has not arrived"),
        (3, step(1, "prefill", 1, 8, computed=[0]), "list of pairs"),
        (3, dict(event="evict", request=4), "request 4 loses its blocks"),
        (4, dict(event="preempt", request=0), "has no tokens"),
        (4, dict(event="schedule"), "has no policy"),
        (4, open_fields(), "a second engine"),
        (4, dict(event="end", request=0, generated=-1), "generated is -1"),
        (0, open_fields(format=99), "format 99"),
        (0, open_fields(num_blocks=0), "num_blocks is 0"),
        (0, open_fields(plugins="x"), "plugins is 'x'"),
        (0, dict(event="other"), "before any open line"),
    ],
)
def test_malformed_lines(tmp_path, place, line, words):
    rows = list(GOOD)
    rows[place] = (rows[place][0], line)
    with pytest.raises(TraceError) as caught:
        read(tmp_path, text_of(rows))
    number = place + 1 if line["event"] != "other" else 2
    assert f"log.jsonl, line {number}: " in str(caught.value) and words in str(caught.value)


@pytest.mark.parametrize(
    "text, words",
    [
        ("", "it is empty"),
        (text_of(GOOD[:1]), "holds no requests"),
        (text_of([(0.0, dict(event="admit"))]), "has no open line"),
        (text_of([GOOD[0], GOOD[1], GOOD[4]]), "holds no requests"),
        (text_of(GOOD)[:-30], "line 5: the file ends in the middle"),
        (text_of([*GOOD[:2], (0.5, lookup(0))]), "line 3: t_ns falls"),
        (text_of(GOOD) + '{"t_ns": 9000000000, "n": 9, "pid": 8, "event": "end", "request": 0}\n', "line 6: pid is 8"),
        (text_of([(0.0, open_fields(num_blocks=2)), *GOOD[1:]]), "room for 8"),
        ("[1]\n", "line 1: holds a list"),
    ],
)
def test_logs_that_make_no_run(tmp_path, text, words):
    with pytest.raises(TraceError) as caught:
        read(tmp_path, text)
    assert words in str(caught.value)


def test_bad_lines_can_be_skipped(tmp_path):
    rows = [*GOOD, (3.0, arrive("x")), (3.0, lookup(9))]
    assert read(tmp_path, text_of(rows), skip_bad=True).num_skipped == 2


def test_too_few_steps_for_a_fit(tmp_path):
    with pytest.raises(TraceError, match="1 samples of prefill steps.*Record a longer run"):
        replay_schedule(read(tmp_path, text_of(GOOD)), {ENGINE: {}})
