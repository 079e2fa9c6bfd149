"""The README names every file and strategy, and its own strategy keeps to the contract."""

import re
from pathlib import Path

import sagellm
from sagellm.accel.speculative.base import SpeculativeStrategy
from sagellm.accel.speculative.contract.rules import check_speculator
from sagellm.accel.speculative.registry import speculator_names

ROOT = Path(sagellm.__file__).parent
TEXT = (ROOT / "accel" / "README.md").read_text()


def test_it_names_every_file_and_strategy():
    files = {*(ROOT / "accel").rglob("*.py"), *(ROOT / "engines" / "lmdeploy" / "speculative").glob("*.py")}
    names = {file.name for file in files} - {"__init__.py"}
    assert len(names) > 25 and not {name for name in names if not re.search(rf"[`/]{re.escape(name)}`", TEXT)}
    assert not [name for name in speculator_names() if not re.search(rf"\| .*`{name}[`:]", TEXT)]


def test_its_strategy_keeps_to_the_contract():
    (demo,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    names: dict = {}
    exec(demo, names)
    kind = names["Repeats"]
    assert issubclass(kind, SpeculativeStrategy)
    report = check_speculator(kind, rounds=1)
    assert report.passed, report
