"""Strategies and plans on TurboMind's hook table: its views alone say who has come and who has ended."""

import pytest

from sagellm.core.config import HookConfig, PluginSpec, SageConfig
from sagellm.core.errors import ConfigError
from sagellm.engines.lmdeploy.settings_plugins import all_plugins
from sagellm.engines.lmdeploy.turbomind import TurboMindHooks
from tests.engines.turbomind import abi
from tests.engines.turbomind.played import PlayedRank
from tests.engines.turbomind.test_steps import SEQUENCES


@pytest.fixture
def hooks_of():
    made = []

    def make(spec: PluginSpec) -> TurboMindHooks:
        made.append(TurboMindHooks(HookConfig(plugins=(spec,)), 16))
        return made[-1]

    yield make
    for hooks in made:
        hooks.close()


def strategy_spec(name: str) -> PluginSpec:
    (spec,) = all_plugins(SageConfig(engine="turbomind", strategy=name))
    return spec


def test_a_strategy_decides_and_hears_of_ends(hooks_of):
    hooks = hooks_of(strategy_spec("shortest"))
    plugin, ended = hooks._host.plugins[0][1], []
    plugin.strategy.on_request_end = ended.append
    rank = PlayedRank(hooks.table)
    priorities, budget = rank.schedule(SEQUENCES, step=1)
    assert sorted(each for each in priorities if each != abi.HOLD) and budget <= 64
    rank.schedule(SEQUENCES[1:], step=2)
    assert ended == [23] and hooks._host.faults == []
    assert plugin.report()["decisions"] >= 1


def test_fifo_is_the_engines_own_order(hooks_of):
    rank = PlayedRank(hooks_of(strategy_spec("fifo")).table)
    priorities, budget = rank.schedule(SEQUENCES)
    assert (priorities, budget) == ([30, 10, 20], 64)


def test_a_plan_runs_there(hooks_of):
    from sagellm.scheduler_ir.graph import IRGraph
    from sagellm.scheduler_ir.nodes import IRNode, NodeType
    from sagellm.scheduler_ir.plan import ExecutionPlan

    hooks = hooks_of(strategy_spec("fifo"))
    runner, rank = hooks._host.plugins[0][1], PlayedRank(hooks.table)
    node = IRNode("last", NodeType.PREFILL_CHUNK, (), ("kv:23:50",), {"request": 23, "start": 0, "tokens": 50})
    runner.submit_plan(ExecutionPlan("p", IRGraph([node]), (23,)))
    priorities, _ = rank.schedule(SEQUENCES, step=1)
    assert priorities[0] == min(priorities), "the plan's request goes first"
    done = dict(SEQUENCES[0], context_len=51, cache_len=50)
    rank.schedule([done, *SEQUENCES[1:]], step=2)
    assert runner.status("p").state.value == "done" and hooks._host.faults == []


def test_the_plug_in_of_the_other_engine_is_refused(hooks_of):
    spec = PluginSpec(name="sagellm.scheduler_ir.strategy_plugin:StrategyPlugin", options={"strategy": "fifo"})
    with pytest.raises(ConfigError, match="does not tell when a request has ended"):
        hooks_of(spec)
