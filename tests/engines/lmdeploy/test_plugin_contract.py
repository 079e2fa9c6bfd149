"""The contract of plug-ins, kept by one of each kind, and broken by planted faults."""

import pytest

from sagellm.core.hooks import Plugin
from sagellm.core.registry import PLUGINS
from sagellm.engines.lmdeploy.contract.plugin import RULES, SUITE
from tests.contract import check_caught, check_kept
from tests.sweeps import slow_but


class Strange(Plugin):
    """Overrides a hook that an engine of one rank never calls, and gives blocks that it may not give."""

    def comm_begin(self, op):
        return None

    def lookup_prefix(self, query):
        return [10**6]


class Unattached(Plugin):
    def __init__(self, *, size):
        self.size = size


@pytest.mark.parametrize(
    ("name", "options"),
    slow_but(
        [("Listener", {}), ("OffloadInstead", {}), ("OwnIndex", {}), ("Budget", {"prefill": 100, "decode": 3})],
        ("OffloadInstead", {}), ("Budget", {"prefill": 100, "decode": 3}),
    ),
)
def test_every_kind_keeps_to_it(name, options):
    report = SUITE.prepare(PLUGINS, f"tests.plugins:{name}", options)()
    check_kept(report, RULES)


@pytest.mark.parametrize(("kind", "rule"), [(Strange, "stays_on"), (Unattached, "builds")])
def test_a_fault_breaks_its_rule(kind, rule):
    report = SUITE.prepare(PLUGINS, f"{__name__}:{kind.__name__}", {})()
    check_caught(report, rule)
