"""Order, hold, budget and admission, from the contract's terms to priorities and back."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from sagellm.core.hooks import COALESCE_S, Phase, ScheduleDecision
from sagellm.engines.lmdeploy.turbomind_steps import UNCUT
from sagellm.replay.schedule.decisions import read_decisions
from tests.engines.turbomind import abi
from tests.engines.turbomind.conftest import plugin_of
from tests.engines.turbomind.played import PlayedRank

# Given in no order; by priority: 21 (decodes), 22 (half of its prompt is computed), 23 (not begun).
SEQUENCES = [
    dict(seq_id=23, priority=30, context_len=0, cache_len=0, n_blocks=0, n_prompt=50, status=0),
    dict(seq_id=21, priority=10, context_len=40, cache_len=39, n_blocks=10, n_prompt=30, status=2),
    dict(seq_id=22, priority=20, context_len=20, cache_len=10, n_blocks=5, n_prompt=20, status=2),
]


@pytest.fixture
def asked(start):
    """(plug-in, function that plays a step)"""
    hooks = start("Schedules", hold_limit_s=60.0)
    rank = PlayedRank(hooks.table)
    return plugin_of(hooks), rank.schedule, hooks


def test_what_a_plugin_sees(asked):
    plugin, schedule, _ = asked
    schedule(SEQUENCES, budget=64, step=9)
    (view,) = plugin.views
    assert (view.step, view.phase, view.free_blocks, view.token_budget) == (9, Phase.PREFILL, 3, 64)
    seen = [(r.request_id, r.phase, r.num_tokens, r.num_computed, r.num_generated, r.num_blocks) for r in view.requests]
    assert seen == [
        (21, Phase.DECODE, 40, 39, 10, 10),
        (22, Phase.PREFILL, 20, 10, 0, 5),
        (23, Phase.PREFILL, 50, 0, 0, 0),
    ]
    schedule(SEQUENCES[1:2], step=10)
    assert plugin.views[1].phase is Phase.DECODE
    assert plugin.views[1].requests[0].arrival_s == view.requests[0].arrival_s > 0


def test_prompts_that_are_forgotten_once_computed(asked):
    plugin, schedule, _ = asked
    schedule([dict(seq_id=1, priority=1, context_len=20, cache_len=10, n_prompt=20)])
    schedule([dict(seq_id=1, priority=1, context_len=25, cache_len=24, n_prompt=0)])
    (request,) = plugin.views[1].requests
    assert (request.phase, request.num_tokens, request.num_generated) == (Phase.DECODE, 25, 5)


def test_requests_with_images(asked):
    """The engine keeps no prompt of them."""
    plugin, schedule, _ = asked
    for context, computed in ((1000, 0), (1000, 512), (1000, 999), (1001, 1000)):
        schedule([dict(seq_id=1, priority=1, context_len=context, cache_len=computed, n_prompt=0)])
    seen = [(r.phase, r.num_tokens, r.num_computed, r.num_generated) for view in plugin.views for r in view.requests]
    assert seen == [
        (Phase.PREFILL, 1000, 0, 0),
        (Phase.PREFILL, 1000, 512, 0),
        (Phase.PREFILL, 1000, 999, 0),
        (Phase.DECODE, 1001, 1000, 1),
    ]
    assert [view.phase for view in plugin.views] == [row[0] for row in seen]


def test_first_seen_while_it_decodes_and_computed_again_after_a_preemption(asked):
    plugin, schedule, _ = asked
    for context, computed in ((1001, 1000), (1002, 512), (1002, 1001)):
        schedule([dict(seq_id=1, priority=1, context_len=context, cache_len=computed, n_prompt=0)])
    seen = [(r.phase, r.num_tokens, r.num_generated) for view in plugin.views for r in view.requests]
    assert seen == [(Phase.DECODE, 1001, 1), (Phase.PREFILL, 1002, 2), (Phase.DECODE, 1002, 2)]


@pytest.mark.parametrize(
    ("decision", "priorities", "budget"),
    [
        (ScheduleDecision(), [30, 10, 20], 64),
        (ScheduleDecision(order=[23, 21, 22]), [10, 20, 30], 64),
        (ScheduleDecision(order=np.array([22, 23, 21])), [20, 30, 10], 64),
        (ScheduleDecision(hold=frozenset([21])), [30, abi.HOLD, 20], 64),
        (ScheduleDecision(order=[23, 22, 21], hold=frozenset([23]), token_budget=8), [abi.HOLD, 30, 20], 8),
        (ScheduleDecision(token_budget=500), [30, 10, 20], 64),
    ],
)
def test_decisions(asked, decision, priorities, budget):
    plugin, schedule, hooks = asked
    plugin.answers.append(decision)
    assert schedule(SEQUENCES) == (priorities, budget)
    assert hooks._host.faults == []


@pytest.mark.parametrize(
    "decision",
    [
        ScheduleDecision(order=[21, 22]), ScheduleDecision(order=[21, 22, 22]), ScheduleDecision(hold=frozenset([99])),
        ScheduleDecision(token_budget=0), [21, 22, 23],
    ],
)  # fmt: skip
def test_decisions_that_make_no_sense(asked, decision):
    plugin, schedule, hooks = asked
    plugin.answers.append(decision)
    assert schedule(SEQUENCES) is None and schedule(SEQUENCES) is None
    assert [fault.kind for fault in hooks._host.faults] == ["nonsense"] and len(plugin.views) == 1


def test_what_the_engine_cannot_do_is_told_with_the_step(asked, monkeypatch):
    plugin, schedule, hooks = asked
    told = []
    monkeypatch.setattr(hooks._host, "post", lambda hook, result: told.append(result))
    plugin.answers += [ScheduleDecision(chunk_tokens={22: 4}), ScheduleDecision()]
    for step in (5, 6):
        assert schedule(SEQUENCES, step=step) == ([30, 10, 20], 64)
        notice = SimpleNamespace(engine=7, group=0, step=step, step_tokens=60, step_sequences=3, time_ns=1)
        hooks._on_step_end(notice)
    assert [(result.step, result.refused) for result in told] == [(5, ((22, UNCUT),)), (6, ())]


def test_a_step_left_to_the_engine_is_left_for_a_while(start, monkeypatch, tmp_path):
    """And each question is on record, as it was."""
    hooks = start("Schedules", record=tmp_path / "record.jsonl")
    plugin, schedule = plugin_of(hooks), PlayedRank(hooks.table).schedule
    now = [100.0]
    monkeypatch.setattr("sagellm.engines.lmdeploy.turbomind_steps.time.monotonic", lambda: now[0])
    plugin.answers += [None, None]
    assert schedule(SEQUENCES) is None and schedule(SEQUENCES) is None and len(plugin.views) == 1
    assert schedule(SEQUENCES[:2]) is None and len(plugin.views) == 2, "another request: asked at once"
    now[0] += 2 * COALESCE_S
    assert schedule(SEQUENCES[:2]) == ([30, 10], 64) and len(plugin.views) == 3
    monkeypatch.undo()
    hooks.close()
    lines = read_decisions(tmp_path / "record.jsonl")
    assert [line.view for line in lines] == plugin.views
    assert [line.decision is None for line in lines] == [True, True, False]


def test_holding_for_too_long_is_a_fault(start):
    hooks = start("Schedules", hold_limit_s=1e-6)
    plugin, rank = plugin_of(hooks), PlayedRank(hooks.table)
    plugin.answers += [ScheduleDecision(hold=frozenset([21]))] * 3
    assert rank.schedule(SEQUENCES) is None or rank.schedule(SEQUENCES) is None
    (fault,) = hooks._host.faults
    assert fault.kind == "nonsense" and "request 21 was kept waiting" in fault.detail


def test_admission(start, monkeypatch):
    now = [100.0]
    monkeypatch.setattr("sagellm.engines.lmdeploy.turbomind_steps.time.monotonic", lambda: now[0])
    hooks = start(("Admits", {"refused": [2]}))
    plugin, rank = plugin_of(hooks), PlayedRank(hooks.table)
    waiting = [(1, 10), (2, 20), (3, 30), (4, 40)]
    assert rank.admit(waiting, max_admitted=2) == [0, 2]
    assert rank.admit(waiting[1:], max_admitted=2) == [1, 2]
    assert [(r.request_id, r.num_tokens) for r in plugin.asked] == [(1, 10), (2, 20), (3, 30), (4, 40)]
    assert rank.admit(waiting[1:2]) == [] and len(plugin.asked) == 4, "refused a moment ago"
    plugin.refused.clear()
    now[0] += 2 * COALESCE_S
    assert rank.admit(waiting[1:2]) == [0] and plugin.asked[-1].request_id == 2
    assert len({r.arrival_s for r in plugin.asked if r.request_id == 2}) == 1, "it arrived once"


def test_a_round_of_admission_is_one_hand_over(start, monkeypatch):
    hooks = start("Admits")
    (guard,) = hooks._host.guards.values()
    handed, put = [], guard._put
    monkeypatch.setattr(guard, "_put", lambda work: handed.append(work) or put(work))
    assert PlayedRank(hooks.table).admit([(request, 10) for request in range(64)], max_admitted=64) == list(range(64))
    assert len(handed) == 1 and len(plugin_of(hooks).asked) == 64


def test_the_record_has_changes_of_admission_alone(start, monkeypatch, tmp_path):
    now, file = [100.0], tmp_path / "record.jsonl"
    monkeypatch.setattr("sagellm.engines.lmdeploy.turbomind_steps.time.monotonic", lambda: now[0])
    hooks = start(("Admits", {"refused": [2]}), record=file)
    plugin, rank = plugin_of(hooks), PlayedRank(hooks.table)
    for _ in range(5):
        rank.admit([(1, 10), (2, 20)])
        now[0] += 2 * COALESCE_S
    plugin.refused.clear()
    assert rank.admit([(1, 10), (2, 20)]) == [0, 1]
    assert [r.request_id for r in plugin.asked] == [1, 2, 2, 2, 2, 2, 2]
    monkeypatch.undo()
    hooks.close()
    lines = [line for line in map(json.loads, file.read_text().splitlines()) if line["event"] == "admit"]
    assert [(line["request"], line["admitted"]) for line in lines] == [(1, True), (2, False), (2, True)]


def test_an_answer_that_is_none_ends_the_round(start):
    hooks = start("AdmitsNonsense")
    plugin, rank = plugin_of(hooks), PlayedRank(hooks.table)
    assert rank.admit([(1, 10), (2, 20), (3, 30)]) is None and plugin.asked == [1]
    (fault,) = hooks._host.faults
    assert (fault.kind, fault.hook) == ("nonsense", "admit")


def test_nobody_is_admitted(start):
    hooks = start(("Admits", {"refused": [1, 2]}))
    assert PlayedRank(hooks.table).admit([(1, 10), (2, 20)]) == [] and hooks._host.faults == []


def test_refusing_for_too_long_is_a_fault(start):
    hooks = start(("Admits", {"refused": [1]}), hold_limit_s=1e-6)
    rank = PlayedRank(hooks.table)
    answers = [rank.admit([(1, 10)]) for _ in range(3)]
    assert answers[-1] is None, "it is the engine's again"
    (fault,) = hooks._host.faults
    assert "request 1 was kept waiting" in fault.detail


def test_hooks_that_nobody_brings_are_null(start):
    rank = PlayedRank(start("Listener").table)
    assert not rank.hooks.schedule and not rank.hooks.admit
    assert rank.hooks.step_end and rank.hooks.comm_end and rank.hooks.flags & abi.TIME_COMM
    plain = PlayedRank(start().table)
    assert not plain.hooks.step_end and not plain.hooks.comm_end and plain.hooks.flags == abi.REPLACE_TRIE
