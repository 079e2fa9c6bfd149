"""The order of the tests: what waits for the background run of the fuzz target comes last of all."""

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.name == "test_fuzzing_finds_nothing_else")
