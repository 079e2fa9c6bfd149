"""Tests of the plug-in host: the plug-in that decides, those that listen, and the counts."""

import json
import threading

import numpy as np
import pytest

from sagellm.core.config import HookConfig, PluginSpec
from sagellm.core.errors import ConfigError, PluginError
from sagellm.core.hooks import Plugin
from sagellm.core.host import START_REFUSED, Nonsense, PluginHost


class Quiet(Plugin):
    def on_step_end(self, result):
        self.heard = [*getattr(self, "heard", []), result]


class Second(Quiet):
    pass


class Loud(Plugin):
    def on_step_end(self, result):
        raise RuntimeError("too loud")


class Admits(Plugin):
    def __init__(self, answer=True):
        self.answer = answer

    def admit(self, request):
        return self.answer


class AdmitsToo(Admits):
    pass


class Closing(Plugin):
    closed = 0

    def close(self):
        type(self).closed += 1


def name_of(kind):
    return f"{__name__}:{kind.__name__}"


def make(*kinds, **values):
    specs = tuple(kind if isinstance(kind, PluginSpec) else PluginSpec(name=name_of(kind)) for kind in kinds)
    return PluginHost(HookConfig(plugins=specs, time_limit_s=1, **values))


def must_be_true(answer):
    if answer is not True:
        raise Nonsense(f"got {answer!r}")
    return "checked"


def test_two_that_decide_the_same_are_refused():
    with pytest.raises(ConfigError, match="Admits and .*AdmitsToo both decide admit; keep one"):
        make(Admits, AdmitsToo)


def test_the_same_name_twice_is_refused():
    with pytest.raises(ConfigError, match="is named twice; name it once"):
        make(Quiet, Quiet)


def test_a_decision_is_checked_and_counted():
    host = make(Admits)
    assert host.decides("admit") and not host.decides("schedule")
    assert host.decide("admit", object(), must_be_true) == (name_of(Admits), "checked")
    assert host.decide("schedule", object(), must_be_true) is None
    assert host.report() == {
        "calls": [[name_of(Admits), "admit", 1]], "faults": [], "enabled": {name_of(Admits): True}
    }  # fmt: skip
    host.close()


@pytest.mark.parametrize("check", [must_be_true, lambda answer: answer.nothing, lambda answer: 1 / 0])
def test_nonsense_switches_off(check):
    host = make(PluginSpec(name=name_of(Admits), options={"answer": "perhaps"}), Quiet)
    assert host.decide("admit", None, check) is None
    assert not host.decides("admit")
    assert host.decide("admit", None, lambda answer: answer) is None
    host.notify("on_step_end", 1)
    report = host.report()
    assert report["faults"] == [[name_of(Admits), "admit", "nonsense", 1]]
    assert report["calls"] == [[name_of(Admits), "admit", 1], [name_of(Quiet), "on_step_end", 1]]
    assert report["enabled"] == {name_of(Admits): False, name_of(Quiet): True}
    json.dumps(report)
    host.close()


def test_notices_go_on_to_the_others():
    host = make(Quiet, Loud, Second)
    for step in (1, 2):
        host.notify("on_step_end", step)
    assert [getattr(plugin, "heard", None) for _, plugin in host.plugins] == [[1, 2], None, [1, 2]]
    assert host.report()["faults"] == [[name_of(Loud), "on_step_end", "raised", 1]]
    assert host.listens("on_step_end") and not host.listens("on_evicted")
    host.close()


def test_posted_notices_wait_for_the_flush_and_keep_their_order():
    host = make(Quiet, Loud, Second)
    for step in (1, 2, 3):
        host.post("on_step_end", step)
    heard = lambda: [getattr(plugin, "heard", None) for _, plugin in host.plugins]  # noqa: E731
    assert heard() == [None, None, None]
    host.flush(after_s=60)
    assert heard() == [None, None, None]
    host.flush()
    assert heard() == [[1, 2, 3], None, [1, 2, 3]]
    assert host.report()["faults"] == [[name_of(Loud), "on_step_end", "raised", 1]]
    assert sorted(host.report()["calls"]) == [[name_of(Quiet), "on_step_end", 3], [name_of(Second), "on_step_end", 3]]
    host.close()


def test_closing_hands_over_what_was_posted():
    host = make(Quiet)
    host.post("on_step_end", 1)
    host.close()
    assert host.plugins[0][1].heard == [1]


def test_blame_switches_off_the_owner():
    host = make(Admits)
    host.blame("admit", "kept a request waiting")
    assert not host.decides("admit")
    assert host.faults[0].detail == "kept a request waiting"
    host.close()


def test_closing_tells_every_plugin_once():
    Closing.closed = 0
    host = make(Closing, Quiet)
    host.close()
    assert Closing.closed == 1
    for guard in host.guards.values():
        guard._thread.join(10)
    assert not any(guard._thread.is_alive() for guard in host.guards.values())


def test_a_fault_is_recorded(tmp_path):
    host = make(Loud, record=tmp_path / "events.jsonl")
    host.notify("on_step_end", 1)
    host.close()
    line, last = [json.loads(text) for text in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert last["event"] == "close"
    assert (line["event"], line["plugin"], line["hook"], line["kind"]) == (
        "fault", name_of(Loud), "on_step_end", "raised",
    )  # fmt: skip
    assert line["detail"] == "RuntimeError: too loud"


def test_hosts_do_not_share_state():
    before = set(threading.enumerate())
    one, two = make(Admits), make(Admits)
    assert len(set(threading.enumerate()) - before) == 2  # the plug-in of each has a thread
    one.blame("admit", "only here")
    assert not one.decides("admit") and two.decides("admit")
    one.close()
    two.close()


class Reports(Plugin):
    def __init__(self, fails=False):
        self.fails = fails

    def report(self):
        if self.fails:
            raise RuntimeError("no report")
        return {"moves": {"gpu-cpu": {"moved": 3, 4: np.int64(5)}}, "share": np.float32(0.5), "name": "x", "list": [1]}


class ReportsToo(Reports):
    pass


def test_what_plugins_report_of_themselves():
    specs = [PluginSpec(name=name_of(Reports)), PluginSpec(name=name_of(ReportsToo), options={"fails": True})]
    host = PluginHost(HookConfig(plugins=(*specs, PluginSpec(name=name_of(Quiet)))))
    for _ in range(2):
        reports = host.plugin_reports()
        assert reports == {name_of(Reports): {"moves": {"gpu-cpu": {"moved": 3.0, "4": 5.0}}, "share": 0.5}}
    assert [(fault.plugin, fault.hook, fault.kind) for fault in host.faults] == [
        (name_of(ReportsToo), "report", "raised")
    ]
    host.close()
    assert host.plugin_reports() == {}


class Unattachable(Plugin):
    def attach(self, engine):
        raise OSError("no such disk")


def test_a_required_plugin_that_cannot_be_attached_ends_the_start(tmp_path):
    host = make(Closing, Unattachable, run_dir=tmp_path)
    host.attach(lambda guard: None)
    assert [fault.hook for fault in host.faults] == ["attach"]
    closed = Closing.closed
    host = make(Closing, PluginSpec(name=name_of(Unattachable), required=True), run_dir=tmp_path)
    with pytest.raises(PluginError, match="Unattachable raised: OSError: no such disk"):
        host.attach(lambda guard: None)
    assert Closing.closed == closed + 1
    assert "no such disk" in (tmp_path / START_REFUSED).read_text()


class Failing(Closing):
    closed = 0
    is_hanging = threading.Event()

    def on_step_end(self, result):
        if result == "hang":
            self.is_hanging.wait(30)
        raise RuntimeError("broken")


@pytest.mark.parametrize("step", ["raise", "hang"])
def test_a_plugin_that_was_switched_off_is_closed_once(monkeypatch, step):
    monkeypatch.setattr("sagellm.core.host.CLOSE_S", 0.1)
    Failing.closed, Failing.is_hanging = 0, threading.Event()
    host = PluginHost(HookConfig(plugins=(PluginSpec(name=name_of(Failing)),), time_limit_s=0.05))
    host.notify("on_step_end", step)
    assert host.faults
    host._closers[name_of(Failing)].join(30)
    assert Failing.closed == 1, "before the host is closed"
    host.close()
    assert Failing.closed == 1
    Failing.is_hanging.set()
