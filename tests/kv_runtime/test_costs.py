"""When a cost model is fitted, and to what; that a record of it replays."""

import json

from sagellm.core.errors import PolicyError
from sagellm.core.hooks import Phase, StepResult
from sagellm.kv_runtime.costs import Costs
from tests.kv_runtime.policies import Chooses
from tests.kv_runtime.workload import manager_of


class Model:
    """Stands for `CostBenefitModel`."""

    lifetime = None

    def __init__(self, text):
        self.text = text

    @classmethod
    def fit(cls, prefill, copies):
        if any(seconds > 100 for *_, seconds in prefill):
            raise PolicyError("no measurement")
        return cls(json.dumps([prefill, {name: len(samples) for name, samples in copies.items()}]))

    def to_json(self):
        return self.text

    @classmethod
    def from_json(cls, text):
        return cls(text)


def step(number, seconds=0.5, **fields):
    return StepResult(number, Phase.PREFILL, 1, 10, 0.0)._replace(duration_s=seconds, num_context_tokens=32, **fields)


def test_a_fit_is_due_after_8_16_32_prompts():
    costs, fits = Costs(), []
    for number in range(1, 40):
        costs.add(step(number))
        if costs.fitted(Model, {}) is not None:
            fits.append(number)
    assert fits == [8, 16, 32]


def test_what_counts_as_a_sample():
    costs = Costs()
    for number in range(8):
        costs.add(step(number, bytes_in=100, swap_s=0.1))
        costs.add(step(number)._replace(num_requests=2))
        costs.add(step(number)._replace(phase=Phase.DECODE))
        costs.add(step(number, seconds=0.0, bytes_in=1, bytes_out=1, swap_s=0.1))
    prefill, copies = json.loads(costs.fitted(Model, {"cpu->nvme": [(1, 0.1)] * 9, "nvme->cpu": [(1, 0.1)]}))
    assert prefill == [[10, 32, 0.5]] * 8 and copies == {"cpu->gpu": 8, "cpu->nvme": 9}


def test_samples_that_fit_nothing_are_passed_over():
    costs = Costs()
    for number in range(8):
        costs.add(step(number, seconds=1000.0))
    assert costs.fitted(Model, {}) is None


def test_a_model_is_part_of_the_record():
    lines = []
    policy = Chooses(lambda key: True)
    policy.model = Model("old")
    manager = manager_of(migration=policy, record=lambda event, **fields: lines.append((event, fields)))
    manager.calibrated("new")
    assert policy.model.text == "new" and lines[-1] == ("kv_calibrated", {"model": "new"})
    without = manager_of(record=lambda event, **fields: lines.append((event, fields)))
    without.calibrated("newer")
    assert lines[-1][0] == "kv_open"
