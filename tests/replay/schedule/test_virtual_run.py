"""A log's requests on the virtual engine."""

from pathlib import Path

import pytest

from sagellm.replay.schedule import virtual_run as virtual_run_module
from sagellm.replay.schedule.compare import compare
from sagellm.replay.schedule.log import read_log
from sagellm.replay.schedule.step_times import fit_step_times
from sagellm.replay.schedule.virtual_run import virtual_run
from sagellm.scheduler_ir.simulation.requests import VirtualRequest
from sagellm.scheduler_ir.simulation.virtual_engine import VirtualEngine
from tests.replay.schedule.made import request
from tests.scheduler_ir.simulation.made import COSTS, SHAPE, Fifo

RECORDED = Path(__file__).with_name("engine.jsonl.gz")


def test_progress_is_told_at_each_end():
    told = []
    virtual_run([request(number, number / 4, 30, 1 + number) for number in range(4)], SHAPE, COSTS, progress=told.append)
    assert told[-1] == 4 and told == sorted(set(told))


@pytest.mark.parametrize("strategy, keeps", [(None, False), (None, True), (Fifo(), False)])
def test_work_grows_with_what_runs_and_not_with_all_requests(monkeypatch, strategy, keeps):
    num_asked, num_rows = 0, 0
    has_ended, metadata = VirtualRequest.has_ended.fget, VirtualRequest.metadata

    def count_asked(self):
        nonlocal num_asked
        num_asked += 1
        return has_ended(self)

    def count_rows(self, phase):
        nonlocal num_rows
        num_rows += 1
        return metadata(self, phase)

    monkeypatch.setattr(VirtualRequest, "has_ended", property(count_asked))
    monkeypatch.setattr(VirtualRequest, "metadata", count_rows)
    requests = [request(number, 3.0 * number, 30, 3) for number in range(100)]
    lines = [] if keeps else None
    found = virtual_run(requests, SHAPE, COSTS, strategy, decisions=lines, progress=lambda num_ended: None)
    assert num_asked <= 4 * sum(len(step.computed) for step in found.steps)
    # The rows of a view are read only if a strategy sees the view or a record keeps it.
    assert (num_rows > 0) is (strategy is not None or keeps) and (not keeps or len(lines) == len(found.steps))


def test_arrivals_come_faster():
    found = virtual_run([request(0, 0.0, 10, 1), request(1, 8.0, 10, 1)], SHAPE, COSTS, speedup=4.0)
    assert [each.arrival_s for each in found.requests] == [0.0, 2.0] and found.steps[-1].end_s == pytest.approx(3.1)


class _Recorded:
    """Step times of a log as they were, each step's until its recorded end."""

    def __init__(self, log):
        self.steps, self.fitted = iter(log.measured.steps), fit_step_times(log.measured.steps, "log")

    def seconds(self, phase, num_requests, num_tokens, attention, now_s):
        step = next(self.steps)
        if (step.phase, step.num_requests, step.num_tokens) != (phase, num_requests, num_tokens):
            return self.fitted.seconds(phase, num_requests, num_tokens, attention)
        return step.end_s - now_s


def test_an_engines_own_schedule_comes_out_again(monkeypatch):
    """40 requests of LMDeploy on a CPU with 60 blocks, two of them preempted: each step with its requests and its tokens."""
    log = read_log(RECORDED)
    times = _Recorded(log)

    class Known(VirtualEngine):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            times.engine = self

    monkeypatch.setattr(virtual_run_module, "VirtualEngine", Known)
    found = virtual_run(log.requests, log.shape, times)
    agreed = compare(log.measured, found)
    assert agreed.first_difference is None and agreed.num_steps_recorded == 223
    assert found.num_preempted == log.measured.num_preempted == 2
    assert [each.first_token_s for each in found.requests] == pytest.approx(
        [each.first_token_s for each in log.measured.requests]
    )
