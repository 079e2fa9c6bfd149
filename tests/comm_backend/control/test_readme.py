"""The demo of the README runs and prints what it says, and every file is named."""

import re
import subprocess
import sys
from pathlib import Path

import sagellm.comm_backend.control
from tests.readme import unnamed_files

TEXT = Path(sagellm.comm_backend.control.__file__).with_name("README.md").read_text()


def test_the_demo_prints_what_it_says():
    (demo,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    found = subprocess.run([sys.executable, "-c", demo], capture_output=True, text=True, check=True)
    lines = [re.sub(r":\d+:", ":PORT:", line) for line in found.stdout.splitlines()]
    assert lines == re.findall(r"print\(.*\)  # (.*)", demo) and len(lines) == 2


def test_every_file_is_named():
    assert unnamed_files(sagellm.comm_backend.control) == set()
