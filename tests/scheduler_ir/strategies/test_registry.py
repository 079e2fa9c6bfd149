"""Strategies by name: spelling, those of others, and what cannot be found or built."""

from importlib.metadata import EntryPoint

import pytest

from sagellm.core import registry as core_registry
from sagellm.core.errors import PlanError
from sagellm.scheduler_ir.strategies.base import SchedulingStrategy
from sagellm.scheduler_ir.strategies.fair import Fair
from sagellm.scheduler_ir.strategies.fifo import Fifo
from sagellm.scheduler_ir.strategies.registry import find_strategy, make_strategy, strategy_names
from sagellm.scheduler_ir.strategies.shortest import Shortest
from sagellm.scheduler_ir.strategies.slo_aware import SloAware

NAMES = sorted("fifo priority slo_aware adaptive aegaeon hybrid shortest fair".split())


class Mine(Fifo):
    name = "mine"


class Unfinished(SchedulingStrategy):
    name = "unfinished"


def test_all_names_are_known():
    assert strategy_names()[: len(NAMES)] == NAMES
    for name in NAMES:
        assert find_strategy(name).name == name == make_strategy(name).name


@pytest.mark.parametrize(("name", "kind"), [
    ("SLO-aware", SloAware), ("slo", SloAware), ("FCFS", Fifo), ("sjf", Shortest), ("VTC", Fair), (f"{__name__}:Mine", Mine),
])  # fmt: skip
def test_other_spellings(name, kind):
    assert find_strategy(name) is kind


def test_strategies_of_others(monkeypatch):
    entry = EntryPoint("my-own", f"{__name__}:Mine", "sagellm.strategies")
    monkeypatch.setattr(core_registry, "entry_points", lambda group: [entry] if group == entry.group else [])
    assert strategy_names() == [*NAMES, "my-own"] and find_strategy("my_own") is Mine


@pytest.mark.parametrize(("name", "message"), [
    ("lifo", "unknown strategy 'lifo'; known are: adaptive, aegaeon, .*module:Class"),
    ("sagellm_nowhere:Thing", "cannot import sagellm_nowhere"),
    (f"{__name__}:Missing", "has no Missing"),
    (f"{__name__}:NAMES", "no strategy; give a subclass of sagellm.scheduler_ir.strategies.base.SchedulingStrategy"),
    (f"{__name__}:Unfinished", "is abstract; define decide"),
])  # fmt: skip
def test_what_cannot_be_found(name, message):
    with pytest.raises(PlanError, match=message):
        find_strategy(name)


@pytest.mark.parametrize(("name", "options", "message"), [
    ("fifo", {"depth": 1}, r"strategy fifo cannot be built with options \{'depth': 1\}"),
    ("priority", {"ageing_s": 0}, "strategy priority: option ageing_s=0; give a number of at least 0.001"),
    ("priority", {"ageing_s": float("nan")}, "option ageing_s=nan"),
    ("slo_aware", {"default_ttft_s": 0}, "option default_ttft_s=0"),
    ("slo_aware", {"rescue_every": 1}, "option rescue_every=1"),
    ("adaptive", {"target_itl_s": True}, "option target_itl_s=True"),
    ("hybrid", {"max_overhead": 1.0}, "option max_overhead=1.0; give a number from 0.001 to 0.9"),
    ("shortest", {"unknown_tokens": 2.5}, "option unknown_tokens=2.5; give a whole number"),
    ("fair", {"input_weight": 0, "output_weight": 0}, "option output_weight=0"),
])  # fmt: skip
def test_options_that_make_no_sense(name, options, message):
    with pytest.raises(PlanError, match=message):
        make_strategy(name, **options)
