"""The contract, kept by plug-ins of each kind."""

from tests.engines.plugin_contract import PluginContract


class TestListener(PluginContract):
    plugin = "tests.plugins:Listener"


class TestOffloadInstead(PluginContract):
    plugin = "tests.plugins:OffloadInstead"


class TestOwnIndex(PluginContract):
    plugin = "tests.plugins:OwnIndex"


class TestBudget(PluginContract):
    plugin = "tests.plugins:Budget"
    options = {"prefill": 100, "decode": 3}  # noqa: RUF012 - declared as a ClassVar in the base
