"""The demo of the README runs and prints what it says."""

import re
import subprocess
import sys
from pathlib import Path

import sagellm.kv_policy

README = Path(sagellm.kv_policy.__file__).with_name("README.md")


def test_the_demo_prints_what_it_says():
    (demo,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    promised = re.findall(r"^print\(.*\)  # (.+)", demo, re.MULTILINE)
    assert len(promised) == demo.count("print(") == 4
    found = subprocess.run([sys.executable, "-c", demo], capture_output=True, text=True, check=True)
    assert found.stdout.splitlines() == promised


def test_every_file_is_named():
    text = README.read_text()
    files = {path.name for path in README.parent.glob("*.py")} - {"__init__.py"}
    assert {name for name in files if f"`{name}`" not in text} == set()
