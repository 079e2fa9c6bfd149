"""What every plug-in must keep to, run on a real engine of tiny size.

To try your own plug-in, subclass `PluginContract` in a test module, name it, and let `start_engine` and `reference` of
`tests/conftest.py` be found (or bring fixtures with these names of your own):

    class TestMine(PluginContract):
        plugin = "my_package.policies:MyPolicy"
        options = {"size": 3}
"""

from typing import Any, ClassVar

from sagellm.core.config import PluginSpec
from sagellm.core.hooks import COMM_HOOKS, DECISIONS, NOTICES, overrides
from sagellm.engines.base import SamplingParams
from tests.plugins import plugin_of
from tests.pool import check_pool, settle
from tests.reference import make_prompts

# More than 30 blocks of 16 tokens can hold, some of it shared: blocks are evicted, requests preempted, prefixes found.
SHARED = make_prompts((48,), seed=5)[0]
CROWD = make_prompts((40, 100, 33, 90, 64, 70, 20), seed=6)
CROWD += [SHARED + tail for tail in make_prompts((9, 20, 1), seed=7)]
PARAMS = SamplingParams(max_new_tokens=30, ignore_eos=True)


class PluginContract:
    plugin: ClassVar[str]
    options: ClassVar[dict[str, Any]] = {}
    host_kv_blocks: ClassVar[int] = 20

    def start(self, start_engine, **config):
        values = dict(kv_blocks=30, host_kv_blocks=self.host_kv_blocks) | config
        return start_engine(PluginSpec(name=self.plugin, options=self.options), **values)

    def test_output_does_not_change_under_pressure(self, start_engine, reference):
        engine = self.start(start_engine)
        for _ in range(2):
            generations = engine.generate(CROWD, PARAMS)
            assert [generation.token_ids for generation in generations] == reference(CROWD, 30)
            settle(engine)
            check_pool(engine)
        assert engine.hooks.report()["evicted"]["prefix"] > 0, "there was no pressure"

    def test_it_stays_on(self, start_engine):
        engine = self.start(start_engine)
        for prompt in CROWD:
            engine.generate([prompt], PARAMS)
        engine.generate(CROWD, PARAMS)
        assert engine.hooks.report()["faults"] == []
        assert engine.hooks.report()["enabled"] == {self.plugin: True}

    def test_every_hook_that_it_brings_is_called(self, start_engine):
        engine = self.start(start_engine)
        for _ in range(2):
            engine.generate(CROWD, PARAMS)
            engine.generate(CROWD[-1:], PARAMS)
        settle(engine)
        called = {hook for _, hook, _ in engine.hooks.report()["calls"]}
        brought = {hook for hook in (*DECISIONS, *NOTICES) if overrides(plugin_of(engine), hook)}
        assert brought <= called
        assert not called & set(COMM_HOOKS), "one rank has no collectives"

    def test_two_engines_do_not_share_it(self, start_engine, reference):
        one, two = self.start(start_engine), self.start(start_engine)
        assert plugin_of(one) is not plugin_of(two)
        for engine in (one, two):
            generations = engine.generate(CROWD[:4], PARAMS)
            assert [generation.token_ids for generation in generations] == reference(CROWD[:4], 30)
