"""The demo of the README runs and prints what it says."""

import sagellm.pd
from tests.readme import check_demo, unnamed_files


def test_the_demos_print_what_they_say():
    check_demo(sagellm.pd, num_prints=2)


def test_every_file_is_named():
    assert unnamed_files(sagellm.pd) == set()
