"""The demo of the README runs and prints what it says."""

import sagellm.scheduler_ir
from tests.readme import check_demo, unnamed_files


def test_the_demos_print_what_they_say():
    check_demo(sagellm.scheduler_ir, num_prints=8)


def test_every_file_is_named():
    assert unnamed_files(sagellm.scheduler_ir) == set()
