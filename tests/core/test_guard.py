"""A call into a plug-in ends in time, whatever the plug-in does."""

import logging
import math
import threading
import time

import pytest

from sagellm.core.guard import PluginGuard, Switched

LIMIT_S = 0.3  # for what is to overrun; what is to succeed has a `patient` guard
PATIENT_S = 20.0


@pytest.fixture
def faults():
    return []


@pytest.fixture
def guard(faults):
    guard = PluginGuard("p", LIMIT_S, faults.append)
    yield guard
    guard.stop()


@pytest.fixture
def patient(faults):
    guard = PluginGuard("p", PATIENT_S, faults.append)
    yield guard
    guard.stop()


def fails(error):
    def function(*args):
        raise error

    return function


def test_results_and_arguments_pass(patient, faults):
    assert patient.call("hook", lambda a, b: a * b, 6, 7) == 42
    assert patient.call("hook", lambda: None) is None
    assert patient.healthy and faults == []


def test_every_call_runs_on_the_same_thread_of_the_plugin(patient):
    idents = {patient.call("hook", threading.get_ident) for _ in range(5)}
    assert len(idents) == 1 and threading.get_ident() not in idents
    assert patient.call("hook", lambda: patient.is_calling) is True
    assert patient.is_calling is False


@pytest.mark.parametrize("error", [ValueError("bad"), SystemExit(1), KeyboardInterrupt(), GeneratorExit()], ids=repr)
def test_raising(patient, faults, caplog, error):
    with caplog.at_level(logging.ERROR, "sagellm"), pytest.raises(Switched):
        patient.call("select_victims", fails(error))
    (fault,) = faults
    assert (fault.plugin, fault.hook, fault.kind) == ("p", "select_victims", "raised")
    assert type(error).__name__ in fault.detail and "in function" in fault.detail, "a traceback belongs in the report"
    assert "plug-in p is switched off: raised in select_victims" in caplog.text
    assert not patient.healthy


def test_overrunning_costs_the_limit_once(guard, faults):
    released = threading.Event()
    start = time.monotonic()
    for _ in range(20):
        with pytest.raises(Switched):
            guard.call("admit", released.wait, 30)
    assert LIMIT_S <= time.monotonic() - start < 20 * LIMIT_S
    released.set()
    assert [(fault.kind, fault.detail) for fault in faults] == [("overran", "no answer within 0.3 s")]


def test_a_late_answer_is_dropped(guard, faults):
    released, finished = threading.Event(), threading.Event()

    def late():
        released.wait(30)
        finished.set()
        raise ValueError("too late to matter")

    with pytest.raises(Switched):
        guard.call("admit", late)
    released.set()
    assert finished.wait(10)
    with pytest.raises(Switched):
        guard.call("admit", lambda: 1)
    assert len(faults) == 1


def test_a_switched_off_plugin_is_never_called(patient):
    calls = []
    with pytest.raises(Switched):
        patient.call("admit", fails(ValueError()))
    with pytest.raises(Switched):
        patient.call("admit", calls.append, 1)
    assert calls == []


def test_nested_calls_run_in_place(patient):
    """A hook may cause another hook of the same plug-in, through its own request to the engine."""
    inner = lambda: (patient.call("inner", threading.get_ident), threading.get_ident())  # noqa: E731
    assert len(set(patient.call("outer", inner))) == 1


def test_a_fault_inside_a_nested_call_is_the_outer_ones(patient, faults):
    with pytest.raises(Switched):
        patient.call("outer", lambda: patient.call("inner", fails(ValueError("deep"))))
    assert [fault.hook for fault in faults] == ["outer"]


def test_only_the_first_fault_is_reported(guard, faults, caplog):
    with caplog.at_level(logging.ERROR, "sagellm"):
        guard.switch_off("one", "nonsense", "first")
        guard.switch_off("two", "nonsense", "second")
    assert [fault.detail for fault in faults] == ["first"]
    assert caplog.text.count("is switched off") == 1


def test_posted_calls_run_before_the_next_one(patient, faults):
    heard = []
    patient.post("notice", heard.append, 1)
    patient.post("notice", heard.append, 2)
    assert heard == []
    assert patient.call("decision", lambda: list(heard)) == [1, 2]
    assert patient.calls == {"notice": 2, "decision": 1} and faults == []


def test_flush_runs_what_has_waited_long_enough(patient):
    heard = []
    patient.flush()
    patient.post("notice", heard.append, 1)
    patient.flush(after_s=60)
    assert heard == []
    patient.flush()
    assert heard == [1]
    patient.flush()
    assert heard == [1]


@pytest.mark.parametrize(("fault", "kind"), [(lambda: 1 / 0, "raised"), (lambda: time.sleep(2 * LIMIT_S), "overran")])
def test_a_posted_call_that_fails_is_the_one_blamed(guard, faults, fault, kind):
    heard = []
    guard.post("before", heard.append, 1)
    guard.post("bad", fault)
    guard.post("after", heard.append, 2)
    with pytest.raises(Switched):
        guard.call("decision", heard.append, 3)
    guard.post("later", heard.append, 4)
    with pytest.raises(Switched):
        guard.call("decision", heard.append, 5)
    guard.stop()
    guard._thread.join(10)
    assert heard == [1]
    assert [(fault.hook, fault.kind) for fault in faults] == [("bad", kind)]
    assert guard.calls["before"] == 1 and guard.calls["decision"] == 0


def test_what_is_handed_over_is_not_waited_for(patient, faults):
    """A call that is posted meanwhile waits its turn; the order stays."""
    heard, released = [], threading.Event()
    patient.post("notice", released.wait, 30)
    patient.post("notice", heard.append, 1)
    assert patient.hand_over() == PATIENT_S and heard == []
    patient.post("notice", heard.append, 2)
    assert 0 < patient.hand_over() < PATIENT_S, "it is busy: look again soon"
    released.set()
    assert patient.call("decision", lambda: list(heard)) == [1, 2]
    assert patient.hand_over() == math.inf and faults == []


@pytest.mark.parametrize(("fault", "kind"), [(lambda: 1 / 0, "raised"), (lambda: time.sleep(2 * LIMIT_S), "overran")])
def test_what_is_handed_over_is_looked_at_later(guard, faults, fault, kind):
    guard.post("bad", fault)
    guard.post("after", faults.append, "never")
    guard.hand_over()
    end_s = time.monotonic() + 10
    with pytest.raises(Switched):
        while time.monotonic() < end_s:
            guard.hand_over()
    guard.stop()
    guard._thread.join(10)
    assert [(fault.hook, fault.kind) for fault in faults] == [("bad", kind)]


def test_a_late_end_that_nobody_saw_is_an_overrun_too(guard, faults):
    guard.post("bad", time.sleep, 1.5 * LIMIT_S)
    guard.hand_over()
    guard.stop()
    guard._thread.join(10)
    with pytest.raises(Switched):
        guard.hand_over()
    assert [(fault.hook, fault.kind) for fault in faults] == [("bad", "overran")]


def test_what_a_slow_plugin_cannot_hear_is_lost_from_the_front(patient, monkeypatch):
    monkeypatch.setattr("sagellm.core.guard.MAX_POSTED", 3)
    heard = []
    for number in range(5):
        patient.post("notice", heard.append, number)
    patient.flush()
    assert heard == [2, 3, 4] and patient.num_lost == 2


def test_views_are_answered_in_one_hand_over(monkeypatch):
    guard = PluginGuard("p", 20.0, pytest.fail)
    handed, put = [], guard._put
    monkeypatch.setattr(guard, "_put", lambda work: handed.append(work) or put(work))
    assert guard.ask("admit", lambda view: 2 * view, range(50)) == list(range(0, 100, 2))
    assert len(handed) == 1 and guard.calls["admit"] == 50
    guard.stop()


def test_no_view_is_begun_once_half_of_the_time_is_over():
    """The rest is for the one that runs, so that none is given up that keeps to its own limit."""
    guard = PluginGuard("p", 20.0, pytest.fail)
    released = threading.Event()
    answers = guard.ask("admit", lambda view: released.wait(0.2) or view, range(1000), time.monotonic() + 2.0)
    assert 1 <= len(answers) <= 6 and answers == list(range(len(answers)))
    assert guard.ask("admit", lambda view: view, range(3)) == [0, 1, 2]
    guard.stop()


def test_a_question_is_given_up_while_the_plugin_hears_what_came_before(caplog):
    guard = PluginGuard("p", 20.0, pytest.fail)
    heard, released = [], threading.Event()
    guard.post("notice", released.wait, 30)
    guard.post("notice", heard.append, 1)
    assert guard.ask("schedule", heard.append, ["given up"], time.monotonic() + 0.05) == []
    assert guard.is_behind()
    released.set()
    assert guard.call("close", lambda: list(heard)) == [1], "what it was told it hears, what it was asked is over"
    assert not guard.is_behind()
    guard.stop()


def test_what_follows_from_giving_up_is_no_fault():
    """The plug-in runs the question when it is given up, and then finds its engine gone."""
    guard = PluginGuard("p", 20.0, pytest.fail)
    begun, given_up = threading.Event(), threading.Event()

    def question(view):
        begun.set()
        given_up.wait(30)
        raise RuntimeError("the engine handle works inside a hook only")

    guard.post("notice", begun.wait, 0)
    assert guard.ask("schedule", question, ["view"], time.monotonic() + 1.0) == [] and begun.is_set()
    given_up.set()
    assert guard.call("next", lambda: "fine") == "fine"
    guard.stop()


def test_several_threads_may_call(faults):
    guard = PluginGuard("p", 20.0, faults.append)
    results = []
    threads = [
        threading.Thread(target=lambda: results.extend(guard.call("hook", int, n) for n in range(300))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(results) == 1200 and faults == []
    guard.stop()


def test_each_call_has_the_whole_limit(faults):
    """Several calls handed over together, none of them late, are no overrun."""
    guard = PluginGuard("p", 1.0, faults.append)
    for _ in range(2):
        guard.post("notice", time.sleep, 0.6)
    assert guard.call("decision", lambda: "in time") == "in time"
    assert faults == []
    guard.stop()


def test_stopping_ends_the_thread(patient):
    assert patient.call("hook", lambda: 1) == 1
    patient.stop()
    patient._thread.join(10)
    assert not patient._thread.is_alive()


def test_an_overrun_waits_for_a_change_in_progress(faults):
    """A plug-in that is late in the middle of a change to the engine's state: the engine goes on after it, not during."""
    guard = PluginGuard("late", 0.5, faults.append)
    order, started = [], threading.Event()

    def change():
        with guard.engine_access:
            started.set()
            threading.Event().wait(1.0)
            order.append("changed")

    with pytest.raises(Switched):
        guard.call("select_victims", change)
    order.append("engine goes on")
    assert started.is_set() and order == ["changed", "engine goes on"]
