"""The demo of the README runs and prints what it says."""

import sagellm.prefix_reuse
from tests.readme import check_demo, unnamed_files


def test_the_demo_prints_what_it_says():
    check_demo(sagellm.prefix_reuse, num_prints=5)


def test_every_file_is_named():
    assert unnamed_files(sagellm.prefix_reuse) == set()
