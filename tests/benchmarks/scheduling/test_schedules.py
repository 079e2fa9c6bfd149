"""What the comparison of strategies says to options that make no sense, before anything is measured."""

import pytest
from click.testing import CliRunner

from benchmarks import schedules


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--scene", "mixed,none"], "'none' is no scene; known are mixed, long, fair, burst"),
        (["--strategy-options", "{"], "is not JSON"),
        (["--strategy-options", "[" * 100_000], "is not JSON"),
        (["--strategy-options", "[]"], "is a JSON list; give an object by strategy"),
        (["--strategy-options", '{"adaptiv": {}}'], "names adaptiv; known are fifo, priority"),
        (["--scene", "fair", "--strategy-options", '{"adaptive": {}}'], "names adaptive; known are fair."),
        (["--strategy-options", '{"engine": {}}'], "names engine"),
        (["--strategy-options", '{"fair": 3}'], "fair has 3; give an object of names and values"),
    ],
)
def test_misuse(monkeypatch, arguments, message):
    monkeypatch.setattr(schedules, "write_shape", lambda folder, shape: pytest.fail("something is measured"))
    done = CliRunner().invoke(schedules.main, arguments)
    assert done.exit_code == 2 and message in " ".join(done.output.split()), done.output


def test_options_go_by_strategy():
    assert schedules.read_options('{"fair": {"a": 1}}', ["burst", "fair"]) == {"fair": {"a": 1}}
