"""Decisions written, read back, and told apart."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sagellm.core.errors import ConfigError, TraceError
from sagellm.core.hooks import Phase, RequestView, ScheduleDecision, ServiceLevel, StepView
from sagellm.replay.schedule.decisions import DecisionLine, first_difference, read_decisions, write_decisions
from sagellm.replay.schedule.virtual_run import virtual_run
from tests.replay.schedule.made import request
from tests.scheduler_ir.simulation.made import COSTS, SHAPE, Cuts, Fifo, LastFirst

ASKED = ServiceLevel(-3, "acme", deadline_s=9.1, ttft_s=0.3)
REQUESTS = [request(0, 0.0, 100, 3), request(1, 0.5, 50, 2), request(2, 0.75, 60, 2, service=ASKED), request(3, 30.0, 30, 1)]


def decisions(strategy=None, name="tested"):
    lines = []
    run = virtual_run(REQUESTS, SHAPE, COSTS, strategy, name=name, decisions=lines)
    sent = {step.step: step.phase for step in run.steps}
    assert [(line.step, line.phase) for line in lines] == list(sent.items())
    return lines


@pytest.mark.parametrize("kind", [None, Fifo, LastFirst, Cuts])
def test_they_come_back(tmp_path, kind):
    lines = decisions(kind and kind())
    write_decisions(tmp_path / "decisions.jsonl", lines)
    assert read_decisions(tmp_path / "decisions.jsonl") == lines
    assert first_difference(lines, read_decisions(tmp_path / "decisions.jsonl")) is None


def test_inputs_choice_and_reason():
    line = decisions(LastFirst(), name="last")[1]
    # While request 0 is computed the others arrive.
    assert (line.view.now_s, line.policy, line.step, line.phase) == (pytest.approx(2.0), "last", 2, Phase.PREFILL)
    chosen = line.decision
    assert chosen.order == [2, 1, 0] and chosen.reason == "who came last" and chosen.reasons == {2: "the youngest"}
    assert line.queue == (
        (1, "prefill", 50, 0, 0, 0), (2, "prefill", 60, 0, 0, 0), (0, "decode", 101, 100, 1, 25)
    )  # fmt: skip
    assert line.view[3:7] == (975, 100, 8, 0)
    assert line.view.requests[2].first_token_s == line.view.now_s and line.view.requests[1].service == ASKED


def test_first_difference():
    ours, theirs = decisions(Fifo()), decisions(LastFirst())
    assert first_difference(ours, theirs) == (1, "order")
    assert first_difference(ours, ours[:-1]) == (len(ours) - 1, "")
    assert first_difference(ours, decisions(Cuts(40)))[0] == 0


@pytest.mark.parametrize(
    "changed, words",
    [
        (dict(phase="x"), "phase is 'x'"), (dict(order=3), "order is 3"), (dict(hold=[-1]), "a request of hold is -1"),
        (dict(queue=[[1, "prefill"]]), "a row of queue"), (dict(chunk_tokens={"a": 1}), "an object by request"),
        (dict(step=1.5), "step is 1.5"), (dict(token_budget="all"), "token_budget is 'all'"),
        (dict(now_s="x"), "now_s is 'x'"), (dict(own=None), "own is None"), (dict(wanted="x"), "wanted is 'x'"),
        (dict(terms=[[1, 0.5, 0, 3]]), "a row of terms"), (dict(terms=[[1, None, 0, ""]]), "an arrival of terms is None"),
        (dict(terms=[[1, 0.5, 0, "", "a", "", None, None, None]]), "a service of terms"), (dict(choice="x"), "choice is 'x'"),
        (dict(queue=[[9, "prefill", 1, 0, 0, 0]]), "no line has its terms"), (dict(policy=3), "policy is 3"),
        (dict(queue=[[0, "decode", 1, 0, 0, 0, "x", 1]]), "a time of queue is 'x'"),
        (dict(groups={"0": "x"}), "a group is 'x'"), (dict(groups={"77": 0}), "groups names request 77"),
    ],
)  # fmt: skip
def test_malformed(tmp_path, changed, words):
    path = tmp_path / "decisions.jsonl"
    write_decisions(path, decisions(Fifo()))
    lines = path.read_text().splitlines()
    lines[1] = json.dumps({**json.loads(lines[1]), **changed})
    path.write_text("\n".join(lines))
    with pytest.raises(TraceError) as caught:
        read_decisions(path)
    assert "line 2: " in str(caught.value) and words in str(caught.value)


def test_no_decisions_and_no_folder(tmp_path):
    (tmp_path / "other.jsonl").write_text('{"event": "step"}\n')
    with pytest.raises(TraceError, match="no schedule lines"):
        read_decisions(tmp_path / "other.jsonl")
    with pytest.raises(ConfigError, match="--decisions"):
        write_decisions(tmp_path / "missing" / "file.jsonl", decisions())


LIKELY = st.sampled_from([0.0, 0.1, 1234.000000001, 3.5e5 + 1e-9, 1e7 + 1 / 3, math.inf])
FLOATS = st.one_of(LIKELY, st.floats(0, 1e9, allow_nan=False))
FINITE = FLOATS.filter(math.isfinite)
SERVICES = st.builds(ServiceLevel, st.integers(-100, 100), st.sampled_from(["", "a"]), FLOATS, FLOATS, FLOATS)
ROWS = st.builds(
    RequestView, st.integers(0, 3), st.sampled_from(Phase), *[st.integers(0, 9)] * 4, FINITE,
    st.sampled_from(["", "lora"]), st.one_of(st.just(ServiceLevel()), SERVICES), st.integers(0, 9), FLOATS, FLOATS,
    st.sampled_from([None, 0, 3]),
)  # fmt: skip
QUEUES = st.lists(ROWS, max_size=4, unique_by=lambda row: row.request_id).map(tuple)
COUNTS = ("free_blocks", "token_budget", "max_batch_size", "num_in_flight")
VIEWS = st.builds(
    StepView, step=st.integers(1, 9), phase=st.sampled_from(Phase), requests=QUEUES, now_s=FINITE,
    **dict.fromkeys(COUNTS, st.integers(0, 9)),
)  # fmt: skip


@given(st.lists(st.tuples(VIEWS, st.booleans(), st.sampled_from([None, *Phase])), min_size=1, max_size=5))
def test_any_view_comes_back_as_it_was(tmp_path_factory, questions):
    """Also where a number is another request's by then, or what it asked for has changed."""
    path = tmp_path_factory.mktemp("d") / "d.jsonl"
    lines = [
        DecisionLine("p", view, None if is_left else ScheduleDecision([], phase=phase, chunk_tokens={3: 4}), phase)
        for view, is_left, phase in questions
    ]
    write_decisions(path, lines)
    found = read_decisions(path)
    assert found == lines and repr(found) == repr(lines)  # to the last bit and the type
