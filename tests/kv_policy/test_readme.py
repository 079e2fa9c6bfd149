"""The demo of the README runs and prints what it says."""

import sagellm.kv_policy
from tests.readme import check_demo, unnamed_files


def test_the_demo_prints_what_it_says():
    check_demo(sagellm.kv_policy, num_prints=4)


def test_every_file_is_named():
    assert unnamed_files(sagellm.kv_policy) == set()
