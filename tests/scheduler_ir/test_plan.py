"""A plan as JSON and back."""

import json
import re

import pytest

from sagellm.core.errors import PlanError
from sagellm.scheduler_ir.plan import ExecutionPlan
from tests.scheduler_ir.made_plans import decode, plan, prefill

GOOD = plan("p", prefill("a", 1, 0, 100), prefill("b", 2, 0, 50), decode("d", [1, 2], ["a", "b"]), target="here")


def test_nothing_is_lost():
    read = ExecutionPlan.from_json(GOOD.to_json())
    assert read == GOOD and read.to_json() == GOOD.to_json()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "this is no JSON"),
        ("{", "this is no JSON"),
        ("[" * 100_000, "this is no JSON"),
        (7, "this is no JSON"),
        ("[]", "this is no plan; give an object with format, plan_id, request_ids, target_instance_id, graph"),
        ("null", "this is no plan"),
        ("{}", "the plan has no format, no plan_id, no request_ids, no target_instance_id, no graph"),
    ],
)
def test_texts_that_are_no_plan(text, message):
    with pytest.raises(PlanError, match=re.escape(message)):
        ExecutionPlan.from_json(text)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": True}, "the plan has format True; this version reads 1"),
        ({"format": 2}, "the plan has format 2; this version reads 1"),
        ({"request_ids": "12"}, "request_ids is '12'; give a list of whole numbers from 0 on"),
        ({"request_ids": {"1": 2}}, "request_ids is {'1': 2}; give a list"),
        ({"request_ids": [1, 2, True]}, "request_ids is [1, 2, True]; give a list"),
        ({"request_ids": [1, 2, "3"]}, "request_ids is [1, 2, '3']; give a list"),
        ({"request_ids": [1, 2, -3]}, "request_ids is [1, 2, -3]; give a list"),
        ({"request_ids": [1, 2, 3.0]}, "request_ids is [1, 2, 3.0]; give a list"),
        ({"request_ids": []}, "requests []; name at least one"),
        ({"target_instance_id": None}, 'target_instance_id is None; give a text, or "" for any instance'),
        ({"target_instance_id": 3}, "target_instance_id is 3"),
        ({"plan_id": ""}, "plan id ''; give a text that is not empty"),
        ({"plan_id": 7}, "plan id 7"),
        ({"graph": None}, "this is no graph"),
        ({"graf": 1, "color": 2}, "the plan has color, graf; allowed are format, plan_id"),
    ],
)
def test_what_makes_no_sense_is_named(change, message):
    with pytest.raises(PlanError, match=re.escape(message)):
        ExecutionPlan.from_json(json.dumps(json.loads(GOOD.to_json()) | change))


@pytest.mark.parametrize("name", ["format", "plan_id", "request_ids", "target_instance_id", "graph"])
def test_what_is_missing_is_named(name):
    document = json.loads(GOOD.to_json())
    del document[name]
    with pytest.raises(PlanError, match=f"the plan has no {name};"):
        ExecutionPlan.from_json(json.dumps(document))
