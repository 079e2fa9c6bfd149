import pytest

from sagellm.control_plane.manager import ControlPlaneManager


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """Managers of this test are found by this test alone."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("SAGELLM_URL", raising=False)


@pytest.fixture
def start_manager():
    """`start_manager(**settings)`: on a free port, and stopped after the test."""
    managers = []

    def start(**settings):
        given = {"port": 0, "check_interval_s": 0.05, "drain_timeout_s": 2.0, "wait_s": 10.0} | settings
        managers.append(ControlPlaneManager(**given))
        return managers[-1].start()

    yield start
    for manager in managers:
        manager.stop()
