"""Every implementation of `PrefixIndex`; add your own to run the contract on it."""

from collections.abc import Callable

import pytest

from sagellm.prefix_reuse import PrefixReuseIndex, ReferencePrefixIndex

IMPLEMENTATIONS = [ReferencePrefixIndex, PrefixReuseIndex]


@pytest.fixture(params=IMPLEMENTATIONS, ids=lambda cls: cls.__name__)
def index_class(request: pytest.FixtureRequest) -> type:
    return request.param


@pytest.fixture
def make(index_class: type) -> Callable:
    """`make(block_size=2, event_capacity=100)`. After the test every index must be consistent in itself."""
    made = []

    def new(block_size: int = 2, event_capacity: int = 100):
        made.append(index_class(block_size, event_capacity=event_capacity))
        return made[-1]

    yield new
    for index in made:
        index.check()


@pytest.fixture
def index(make: Callable):
    return make()
