"""Ranks of a measurement that fail or end are told by number."""

import os

import pytest

from sagellm.comm_backend.rank_processes import run_ranks
from sagellm.core.errors import CommError


def fail_or_end(backends, number):
    (backend,) = backends.values()
    if number is not None:
        os._exit(number)
    return {}[backend.world_size]


@pytest.mark.parametrize(
    ("number", "words"),
    [(None, "KeyError: 1"), pytest.param(3, "its process has ended", marks=pytest.mark.slow)],
)
def test_a_rank_that_fails(number, words):
    with pytest.raises(CommError, match=f"^rank 0 of the measurement failed: {words}\\.$"):
        run_ranks(fail_or_end, ("gloo",), number, world_size=1)
