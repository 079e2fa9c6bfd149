"""A machine that is slow for a while: what the average of its steps hides, and the drift tells."""

import pytest

from sagellm.core.hooks import Phase
from sagellm.replay.schedule.compare import compare
from sagellm.replay.schedule.drift import DriftingCosts, drift_of
from sagellm.replay.schedule.step_times import fit_step_times
from sagellm.replay.schedule.virtual_run import virtual_run
from tests.replay.schedule.made import request
from tests.scheduler_ir.simulation.made import COSTS, SHAPE

REQUESTS = [request(number, 1.1 * number, 40 + 20 * (number % 3), 2 + number % 4) for number in range(60)]


class _Slow:
    """Half again as long from the 20th to the 60th second."""

    def seconds(self, phase, num_requests, num_tokens, attention, now_s):
        return (1.5 if 20 <= now_s < 60 else 1.0) * COSTS.seconds(phase, num_requests, num_tokens, attention)


def test_what_the_average_hides():
    measured = virtual_run(REQUESTS, SHAPE, _Slow())
    average = fit_step_times(measured.steps, "made")
    drifting = drift_of(average, measured.steps)
    without, with_it = (
        abs(compare(measured, virtual_run(REQUESTS, SHAPE, costs)).errors["ttft_mean_s"]) for costs in (average, drifting)
    )
    assert without > 0.1 and with_it < 0.02
    spread = [drifting.seconds(Phase.DECODE, 1, 1, 0.0, at) for at in (10, 40)]
    assert spread[1] / spread[0] == pytest.approx(1.5, rel=0.05)


def test_a_steady_machine_does_not_drift():
    steps = virtual_run(REQUESTS, SHAPE, COSTS).steps
    drifting = drift_of(COSTS, steps)
    assert min(drifting.factors) == pytest.approx(1) == pytest.approx(max(drifting.factors))
    late = DriftingCosts(COSTS, [1.0, 2.0], [3.0, 5.0])
    own = COSTS.seconds(Phase.PREFILL, 1, 10, 0.0)
    found = [late.seconds(Phase.PREFILL, 1, 10, 0.0, at) for at in (0.5, 1.0, 1.5, 2.5)]
    assert found == pytest.approx([3 * own, 3 * own, 5 * own, own])
