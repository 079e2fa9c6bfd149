"""The demo of the README runs and prints what it says."""

import sagellm.scheduler_ir
from tests.readme import check_demo, unnamed_files


def test_the_demo_prints_what_it_says():
    check_demo(sagellm.scheduler_ir, num_prints=5)


def test_every_file_is_named():
    assert unnamed_files(sagellm.scheduler_ir) == set()
