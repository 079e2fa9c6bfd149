"""The demo of the README runs and prints what it says, and every file and channel is named."""

import re
import subprocess
import sys
from pathlib import Path

import sagellm.comm_backend.kv_transfer
from sagellm.comm_backend.kv_transfer.registry import channel_names
from tests.readme import unnamed_files

TEXT = Path(sagellm.comm_backend.kv_transfer.__file__).with_name("README.md").read_text()


def test_the_demo_prints_what_it_says():
    (demo,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    found = subprocess.run([sys.executable, "-c", demo], capture_output=True, text=True, check=True)
    assert found.stdout.splitlines() == re.findall(r"print\(.*\)  # (.*)", demo) and found.stdout.count("\n") == 2


def test_every_file_and_channel_is_named():
    assert unnamed_files(sagellm.comm_backend.kv_transfer) == set()
    assert not [name for name in channel_names() if f"`{name}`" not in TEXT]
