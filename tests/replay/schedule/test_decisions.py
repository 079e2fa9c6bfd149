"""Decisions written, read back, and told apart."""

import json

import pytest

from sagellm.core.errors import ConfigError, TraceError
from sagellm.core.hooks import Phase
from sagellm.replay.schedule.decisions import first_difference, read_decisions, write_decisions
from sagellm.replay.schedule.virtual_engine import VirtualEngine
from tests.replay.schedule.made import SHAPE, TIMES, Cuts, Fifo, LastFirst, request

REQUESTS = [request(0, 0.0, 100, 3), request(1, 0.5, 50, 2), request(2, 0.75, 60, 2), request(3, 30.0, 30, 1)]


def decisions(strategy=None, name="tested"):
    engine = VirtualEngine(SHAPE, TIMES, strategy, name=name, keep_decisions=True)
    run = engine.run(REQUESTS)
    sent = {step.step: step.phase for step in run.steps}
    assert [(line.step, line.phase) for line in engine.decisions] == list(sent.items())
    return engine.decisions


@pytest.mark.parametrize("kind", [None, Fifo, LastFirst, Cuts])
def test_they_come_back(tmp_path, kind):
    lines = decisions(kind and kind())
    write_decisions(tmp_path / "decisions.jsonl", lines)
    assert read_decisions(tmp_path / "decisions.jsonl") == lines
    assert first_difference(lines, read_decisions(tmp_path / "decisions.jsonl")) is None


def test_inputs_choice_and_reason():
    line = decisions(LastFirst(), name="last")[1]
    # While request 0 is computed the others arrive.
    assert (line.time_s, line.policy, line.step, line.phase) == (pytest.approx(2.0), "last", 2, Phase.PREFILL)
    assert line.order == (2, 1, 0) and line.reason == "who came last" and line.reasons == {2: "the youngest"}
    assert line.queue == (
        (1, "prefill", 50, 0, 0, 0), (2, "prefill", 60, 0, 0, 0), (0, "decode", 101, 100, 1, 25)
    )  # fmt: skip
    assert (line.free_blocks, line.in_flight, line.limit, line.max_batch) == (975, 0, 100, 8)


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
    ],
)  # fmt: skip
def test_malformed(tmp_path, changed, words):
    path = tmp_path / "decisions.jsonl"
    write_decisions(path, decisions())
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
