"""Tests of the comparison of strategies: it refuses options that make no sense before it measures anything."""

from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from benchmarks import schedules


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--scene", "mixed,none"], "'none' is no scene; known are mixed, long, fair, models, burst"),
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


def test_whole_requests_of_one_model_go_before_those_of_another():
    from benchmarks.scheduling.by_model import ByModel

    def view(*requests):
        return SimpleNamespace(requests=[SimpleNamespace(request_id=n, adapter=a, arrival_s=t) for n, a, t in requests])

    strategy = ByModel()
    assert strategy.decide(view()) is None
    first = strategy.decide(view((1, "a", 0.0), (2, "b", 0.1), (3, "a", 0.2)))
    assert list(first.order) == [1, 3, 2] and first.hold == {2}
    assert list(strategy.decide(view((2, "b", 0.1), (3, "a", 0.2))).order) == [3, 2], "a still has a request"
    assert strategy.decide(view((2, "b", 0.1))).hold == frozenset()
