"""Engines, stores and folders that more than one file of tests needs; closed at the end."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from sagellm.kv_runtime.plugin import TieredKVWithDisk
from tests.kv_runtime.disk_engine import opened
from tests.kv_runtime.fake_engine import FakeEngine, plugin_with
from tests.kv_runtime.migration_setup import Setup
from tests.kv_runtime.policies import make_policy
from tests.kv_runtime.store_contract import put
from tests.kv_runtime.test_disk_store import open_store


@pytest.fixture
def start(tmp_path):
    """Starts an engine on the same folder; all are closed at the end."""
    engines = []

    def start(pool=4, host=4, make_migration=lambda name, **options: None, wait=True, key_bits=64, **options):
        options = {"disk": tmp_path / "kv", "disk_gib": 1e-3, "deadline_s": 60.0, **options}
        plugin = plugin_with(TieredKVWithDisk, make_policy, make_migration, **options)
        engines.append(FakeEngine(plugin, pool, host, key_bits=key_bits))
        if wait:
            opened(engines[-1])
        return engines[-1]

    yield start
    for engine in engines:
        engine.plugin.close()


@pytest.fixture
def setup(tmp_path: Path) -> Iterator[Setup]:
    setup = Setup(tmp_path, num_threads=1)
    yield setup
    setup.migrator.close()
    setup.check()
    setup.disk.close()


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """A folder with blocks 1 and 2, closed."""
    store = open_store(tmp_path / "tier")
    put(store, 1, tenant_id="tenant")
    put(store, 2)
    store.close()
    return tmp_path / "tier"
