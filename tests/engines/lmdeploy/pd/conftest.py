import pytest

from tests.engines.lmdeploy.pd.pair import Pair


@pytest.fixture
def pair(start_engine, tmp_path):
    """`pair(prefill={}, decode={}, ...)`: as `Pair`."""

    def start(**values):
        return Pair(start_engine, tmp_path, **values)

    return start
