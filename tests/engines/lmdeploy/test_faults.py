"""A plug-in that fails is switched off, counted once, and no request is lost or changed."""

import re
import threading
import time

import pytest

from sagellm.core.config import PluginSpec
from sagellm.core.errors import PluginError
from sagellm.engines.base import SamplingParams
from tests.engines.lmdeploy import faulty as plugins
from tests.engines.lmdeploy.faulty import HOOKS, name_of
from tests.engines.lmdeploy.test_exactness import CROWD, answers
from tests.plugins import plugin_of
from tests.sweeps import slow_but

LIMIT_S = 0.6  # also of the neighbour's thousands of calls, each of which must be in time
PARAMS = SamplingParams(max_new_tokens=24, ignore_eos=True)
# Together they want about twice the 16 blocks that they get.
FEW = CROWD[:1] + CROWD[2:5] + CROWD[6:8]


def faulty(hook, fault):
    return PluginSpec(name=name_of(hook), options={"fault": fault})


@pytest.fixture
def wakes_at_the_end(start_engine, monkeypatch):
    """Wake plug-ins that sleep before the engine is closed, which would wait for them. The tests of values that are traps
    show that closing does not wait long."""
    awake = threading.Event()
    monkeypatch.setattr(plugins, "AWAKE", awake)
    yield
    awake.set()


@pytest.mark.usefixtures("wakes_at_the_end")
@pytest.mark.parametrize(
    ("fault", "kind"),
    slow_but([("raise", "raised"), ("exit", "raised"), ("sleep", "overran")], ("raise", "raised"), ("sleep", "overran")),
)
@pytest.mark.parametrize("hook", HOOKS)
def test_each_hook_that_fails(start_engine, reference, hook, fault, kind):
    engine = start_engine(
        faulty(hook, fault), "tests.plugins:Listener", kv_blocks=16, plugin_time_limit_s=LIMIT_S
    )  # fmt: skip
    start = time.monotonic()
    assert answers(engine, FEW, PARAMS) == reference(FEW, 24)
    assert answers(engine, FEW[:1], PARAMS) == reference(FEW[:1], 24)
    report = engine.hooks.report()
    assert report["faults"] == [[name_of(hook), hook, kind, 1]]
    assert report["enabled"] == {name_of(hook): False, "tests.plugins:Listener": True}
    assert plugin_of(engine).calls == 1, "it was called again after it failed"
    # The neighbour goes on hearing everything.
    listener = plugin_of(engine, 1)
    assert len(listener.ended) == len(FEW) + 1
    assert listener.evicted and listener.stored and listener.steps
    if kind == "overran":
        # It costs its limit once; the wide margin is for a slow machine.
        assert time.monotonic() - start < 25


VICTIMS = ["none", "number", "endless", "odd", "unknown", "negative", "active", "twice", "orphan", "of_objects"]
VICTIMS += ["exit_when_read"]
SCHEDULES = [
    "number", "budget", "budget_text", "budget_fraction", "budget_infinite",
    "drops", "duplicates", "invents", "endless_order", "holds_unknown",
    "holds_number",
]  # fmt: skip
NONSENSE = [
    *[("select_victims", fault) for fault in VICTIMS],
    *[("schedule", fault) for fault in SCHEDULES],
    *[("admit", fault) for fault in ("none", "number", "text")],
    *[("lookup_prefix", fault) for fault in ("number", "text", "endless", "foreign", "free_block")],
]


# Words of the report for the faults that only a check of their own can find.
DETAILS = {
    "unknown": "are unknown or active", "active": "are unknown or active", "twice": "names? a block twice",
    "orphan": "still has the cached child", "drops": "must name each", "duplicates": "must name each",
    "invents": "must name each", "holds_unknown": "are not in this step", "foreign": "does not hold tokens 0 to 16",
    "free_block": "is not cached",
}  # fmt: skip


@pytest.mark.parametrize(("hook", "fault"), slow_but(NONSENSE, *NONSENSE[::3]))
def test_nonsense(start_engine, reference, hook, fault):
    engine = start_engine(faulty(hook, fault), kv_blocks=16)
    for _ in range(2):
        assert answers(engine, FEW, PARAMS) == reference(FEW, 24)
    assert engine.hooks.report()["faults"] == [[name_of(hook), hook, "nonsense", 1]]
    assert engine.hooks.report()["enabled"] == {name_of(hook): False}
    assert re.search(DETAILS.get(fault, ""), engine.hooks._host.faults[0].detail)


@pytest.mark.parametrize(
    ("fault", "kind"), [("sleep_when_read", "overran"), ("migrates_endlessly", "raised"), ("migrates_sleeping", "overran")]
)
def test_a_plugin_whose_values_are_traps(start_engine, reference, fault, kind):
    """Values from a plug-in are read on the plug-in's own thread, before the engine's state is locked."""
    engine = start_engine(faulty("select_victims", fault), kv_blocks=16, plugin_time_limit_s=LIMIT_S)
    assert answers(engine, FEW, PARAMS) == reference(FEW, 24)
    assert engine.hooks.report()["faults"] == [[name_of("select_victims"), "select_victims", kind, 1]]


def test_the_fault_says_what_was_got_and_what_is_allowed(start_engine):
    engine = start_engine(faulty("schedule", "budget"))
    answers(engine, FEW, PARAMS)
    (fault,) = engine.hooks._host.faults
    assert fault.detail == "Nonsense: token budget 0; allowed are 1 to 512, or None"


def test_an_eviction_callback_that_fails(start_engine, reference):
    engine = start_engine("tests.plugins:BadCallback", kv_blocks=16)
    assert answers(engine, FEW, PARAMS) == reference(FEW, 24)
    assert engine.hooks.report()["faults"] == [["tests.plugins:BadCallback", "eviction_callback", "raised", 1]]


def test_closing_is_not_stopped_by_a_plugin(start_engine, reference):
    from sagellm.core.config import SageConfig
    from sagellm.engines.lmdeploy.engine import LMDeployEngine

    model = start_engine().engine.model_config.hf_config._name_or_path
    for fault in ("raise", "sleep"):
        config = SageConfig(
            model=model, device="cpu", threads=1, kv_blocks=16, plugins=(faulty("close", fault),),
            plugin_time_limit_s=LIMIT_S,
        )  # fmt: skip
        with LMDeployEngine(config) as engine:
            assert answers(engine, FEW[:1], PARAMS) == reference(FEW[:1], 24)
        engine.close()  # once more does no harm
        assert engine.hooks.report()["enabled"] == {name_of("close"): False}


def test_a_plugin_that_cannot_be_built_stops_the_start(start_engine):
    with pytest.raises(PluginError, match="cannot be built with options"):
        start_engine(PluginSpec(name="tests.plugins:Budget", options={"wrong": 1}))
    with pytest.raises(PluginError, match="unknown plug-in 'nobody'"):
        start_engine("nobody")
