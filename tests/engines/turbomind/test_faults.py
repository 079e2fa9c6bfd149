"""Plug-ins that sleep, raise or answer nonsense: each costs its time limit once at most, and no request."""

import subprocess
import sys
import textwrap

import pytest

from benchmarks.processes import wait_until
from sagellm._core import HookTable, PluginPort
from tests.engines.turbomind.conftest import plugin_of
from tests.engines.turbomind.played import PlayedRank, play

LIMIT_S = 0.4
SLACK_S = 3.0  # a thread of a loaded machine may be late; the plug-in sleeps ten times longer
PROMPTS = [[seed * 1000 + place for place in range(12)] for seed in range(40)]  # 3 blocks each, 12 in the pool


@pytest.mark.parametrize(
    ("plugin", "kind"),
    [
        ("Sleeps", "overran"),
        ("Raises", "raised"),
        ("Moves", "raised"),
        (("Answers", {"victims": [99]}), "nonsense"),
        (("Answers", {"victims": [0, 0]}), "nonsense"),
        (("Answers", {"victims": "all"}), "nonsense"),
        (("Answers", {"victims": 7}), "nonsense"),
    ],
)
def test_a_fault_costs_the_limit_once_and_no_request(start, plugin, kind):
    hooks = start(plugin, time_limit_s=LIMIT_S)
    ranks = play(hooks.table, PROMPTS)
    assert all(len(rank.num_matched) == len(PROMPTS) for rank in ranks)
    assert len({str(rank.victims) for rank in ranks}) == 1 and ranks[0].victims
    assert max(rank.slowest_s for rank in ranks) < LIMIT_S + SLACK_S
    assert hooks.port.stats()["asked"] == 1
    assert [fault.kind for fault in hooks._host.faults] == [kind]
    wait_until("its questions are not asked", lambda: hooks.port.topics == ())
    assert list(hooks.report()["enabled"].values()) == [False]
    assert hooks.table.stats()["divergences"] == 0


def test_the_limit_holds_while_nobody_can_run_python(start):
    """The engine's thread gives up by itself, in the middle of a call that keeps the GIL."""
    hooks = start("KeepsTheInterpreter", "Listener", time_limit_s=LIMIT_S)
    (rank,) = play(hooks.table, PROMPTS, num_ranks=1)
    assert len(rank.num_matched) == len(PROMPTS)
    assert hooks.port.fault == ("select_victims", "overran", "no answer within 0.4 s")
    wait_until("the plug-in is blamed", lambda: [fault.kind for fault in hooks._host.faults] == ["overran"])
    assert list(hooks.report()["enabled"].values()) == [False, False], "nobody is asked or told any more"


def test_the_others_stay_on(start):
    hooks = start("Sleeps", "Listener", time_limit_s=LIMIT_S)
    play(hooks.table, PROMPTS, num_ranks=1)
    assert hooks.port.fault is None
    assert list(hooks.report()["enabled"].values()) == [False, True]
    listener = hooks._host.plugins[1][1]
    wait_until("the end", lambda: len(listener.steps) == len(PROMPTS))
    wait_until("only the listener counts", lambda: "select_victims" not in hooks.port.topics)


def test_notices_never_keep_the_engine(start):
    hooks = start("SlowListener", time_limit_s=LIMIT_S)
    (rank,) = play(hooks.table, PROMPTS, num_ranks=1)
    assert len(rank.num_matched) == len(PROMPTS)
    wait_until("it is off", lambda: [fault.kind for fault in hooks._host.faults] == ["overran"])
    wait_until("nothing is told any more", lambda: hooks.port.topics == ())
    assert hooks.port.stats()["asked"] == 0


SEQUENCE = {"seq_id": 1, "priority": 5}


def test_those_who_hang_as_listeners_do_not_keep_the_one_who_decides(start):
    hooks = start("HangsAtStepEnd", "HangsThere", "Schedules", time_limit_s=LIMIT_S)
    rank = PlayedRank(hooks.table)
    rank._step_end(1)
    wait_until("they hear of it", lambda: all(guard._works for guard in list(hooks._host.guards.values())[:2]))
    assert rank.schedule([SEQUENCE]) == ([5], 64)
    wait_until("both are off", lambda: len(hooks._host.faults) == 2)
    assert rank.schedule([SEQUENCE]) == ([5], 64) and hooks.port.fault is None
    assert {(fault.hook, fault.kind) for fault in hooks._host.faults} == {("on_step_end", "overran")}
    assert list(hooks.report()["enabled"].values()) == [False, False, True]
    wait_until("nobody is told any more", lambda: hooks.port.topics == ("schedule",))


def test_one_busy_with_what_it_was_told_leaves_the_step_to_the_engine(start):
    """Each of its notices keeps to the limit, both together do not."""
    hooks = start(("HearsSlowly", {"each_s": 0.8}), time_limit_s=1.2)
    rank, plugin = PlayedRank(hooks.table), plugin_of(hooks)
    rank._step_end(1)
    rank._step_end(1)
    assert rank.schedule([SEQUENCE]) is None
    assert rank.schedule([SEQUENCE]) is None, "not waited for again before it has caught up"
    assert hooks.port.fault is None and hooks._host.faults == []
    plugin.faster.set()
    wait_until("it has heard", lambda: len(plugin.heard) == 2)
    assert rank.schedule([SEQUENCE], step=2) == ([5], 64)
    assert plugin.heard == [1, 2, "asked"] and hooks._host.faults == []


def test_a_port_that_is_off_is_not_blamed_on_one_who_kept_to_his_limit(start):
    hooks = start("Schedules", time_limit_s=LIMIT_S)
    hooks.port.fail("schedule", "overran", "no answer within 0.4 s")
    wait_until("it is reported", lambda: hooks._host.faults)
    (fault,) = hooks._host.faults
    assert (fault.plugin, fault.hook, fault.kind) == ("TurboMind adapter", "schedule", "overran")


def test_many_waiting_requests_are_no_fault(start):
    """A request that there is no time to ask about waits, and comes first in the next round."""
    hooks = start("AdmitsSlowly", "Listener", time_limit_s=LIMIT_S)
    rank, plugin = PlayedRank(hooks.table), plugin_of(hooks)
    waiting = [(request, 10) for request in range(100)]
    for _ in range(200):
        assert rank.admit(waiting) == []
        if len(plugin.asked) >= 100:
            break
    assert plugin.asked[:100] == list(range(100))
    assert hooks.port.fault is None and hooks._host.faults == []
    assert list(hooks.report()["enabled"].values()) == [True, True]


def test_an_adapter_that_fails_is_off_with_a_reason(start, monkeypatch):
    hooks = start("MostRecentFirst", time_limit_s=LIMIT_S)
    monkeypatch.setattr(hooks, "_answer", None)
    (rank,) = play(hooks.table, PROMPTS, num_ranks=1)
    assert len(rank.num_matched) == len(PROMPTS) and hooks.port.stats()["asked"] == 1
    _, kind, detail = hooks.port.fault
    assert kind == "raised" and "NoneType" in detail
    wait_until("it is reported", lambda: [fault.kind for fault in hooks._host.faults] == ["raised"])


def test_nobody_answers():
    """A port without an adapter: the engine waits once."""
    port = PluginPort(0.05, ["select_victims"])
    table = HookTable(port)
    ranks = play(table, PROMPTS)
    assert all(len(rank.num_matched) == len(PROMPTS) for rank in ranks)
    assert port.fault[:2] == ("select_victims", "overran") and port.stats()["asked"] == 1


def test_answers_after_the_end_are_dropped():
    port = PluginPort(0.05, ["schedule"])
    rank = PlayedRank(HookTable(port, schedule=True))
    assert rank.schedule([{"seq_id": 1, "priority": 5}]) is None
    assert port.answer(1, priorities=[5], budget=4) is False and port.stats()["late"] == 1
    assert port.next(1.0) is None


@pytest.mark.parametrize("topics", [["schedule", "nothing"], ["Admit"]])
def test_unknown_topics(topics):
    with pytest.raises(ValueError, match=r"unknown topic '\w+'; known are select_victims, .*collective"):
        PluginPort(1.0, topics)


@pytest.mark.parametrize("limit", [0, -1, float("nan"), float("inf")])
def test_limits_that_are_none(limit):
    with pytest.raises(ValueError, match="time_limit_s"):
        PluginPort(limit, [])


def test_the_process_ends_while_the_engine_asks():
    """Threads of the engine ask, and one waits for questions, while the interpreter goes."""
    code = """
        import threading
        from sagellm.core.config import HookConfig, PluginSpec
        from sagellm.engines.lmdeploy.turbomind import TurboMindHooks
        from tests.engines.turbomind.played import PlayedRank

        plugin = PluginSpec(name="tests.engines.turbomind.plugins:Schedules")
        hooks = TurboMindHooks(HookConfig(plugins=(plugin,)), 4)
        seen = threading.Event()

        def ask():
            # Only hooks that need nothing of the engine: what this one has to tell, it tells in Python.
            rank = PlayedRank(hooks.table)
            for step in range(10**9):
                rank.schedule([{"seq_id": 1, "priority": 5}])
                if step == 50:
                    seen.set()

        for _ in range(4):
            threading.Thread(target=ask, daemon=True).start()
        seen.wait()
        assert hooks.port.stats()["answered"] > 0
        print("the end")
    """
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=120)
        assert (done.returncode, done.stdout, done.stderr) == (0, "the end\n", "")
