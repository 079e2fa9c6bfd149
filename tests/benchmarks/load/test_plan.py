"""Plans come back as they were written; what cannot be followed is refused in one line."""

import json

import pytest

from benchmarks.errors import BenchmarkError
from benchmarks.load.client import encode
from benchmarks.load.plan import Plan, PlannedRequest, read_plan

URL = "http://127.0.0.1:1"
OPEN = {"scheduled_s": 0.5, "prompt_ids": [5, 6], "max_tokens": 3}
CLOSED = {"text": "Hello", "max_tokens": 3}


def test_round_trip(tmp_path):
    asking = OPEN | {"service": {"priority": -3, "ttft_slo_ms": 250}}
    for options in (
        dict(requests=[OPEN], headers={"A": "b"}), dict(requests=[asking]), dict(requests=[CLOSED], concurrency=2, grace_s=1.0)
    ):  # fmt: skip
        plan = Plan(url=URL, **options)
        plan.write(tmp_path / "plan.json")
        assert read_plan(tmp_path / "plan.json") == plan


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"requests": []}, "requests: List should have at least 1 item"),
        ({"requests": [OPEN], "url": "localhost"}, "url: String should match"),
        ({"requests": [OPEN], "stream": False}, "stream: Extra inputs are not permitted"),
        ({"requests": [OPEN], "concurrency": 2}, "plan: a closed loop has no scheduled_s"),
        ({"requests": [CLOSED]}, "plan: scheduled_s is needed"),
        ({"requests": [OPEN, OPEN | {"scheduled_s": 0.1}]}, "plan: requests must be in the order"),
        ({"requests": [OPEN], "endpoint": "chat"}, "plan: endpoint chat takes text"),
        ({"requests": [OPEN | CLOSED]}, "requests.0: a request needs either prompt_ids or text"),
        ({"requests": [OPEN | {"prompt_ids": []}]}, "requests.0: a request needs either"),
        ({"requests": [OPEN | {"max_tokens": 0}]}, "requests.0.max_tokens: Input should be greater"),
    ],
)
def test_bad_plans(tmp_path, values, message):
    file = tmp_path / "plan.json"
    file.write_text(json.dumps({"url": URL, **values}))
    with pytest.raises(BenchmarkError) as caught:
        read_plan(file)
    assert str(caught.value).startswith(f"plan {file}: {message}")


def test_files_that_are_no_plan(tmp_path):
    with pytest.raises(BenchmarkError, match="cannot read plan .*: No such file"):
        read_plan(tmp_path / "none")
    (tmp_path / "plan").write_text("{")
    with pytest.raises(BenchmarkError, match="plan: Invalid JSON"):
        read_plan(tmp_path / "plan")


@pytest.mark.parametrize(
    ("endpoint", "request_", "expected"),
    [
        ("generate", OPEN, {"input_ids": [5, 6]}),
        ("generate", CLOSED, {"prompt": "Hello"}),
        ("completions", OPEN, {"prompt": [5, 6], "model": "m"}),
        ("completions", CLOSED, {"prompt": "Hello", "model": "m"}),
        ("chat", CLOSED | {"seed": 4}, {"messages": [{"role": "user", "content": "Hello"}], "model": "m", "seed": 4}),
    ],
)
def test_bodies(endpoint, request_, expected):
    request = PlannedRequest(**request_)
    plan = Plan(
        url=URL, endpoint=endpoint, model="m", requests=[request], concurrency=None if request.scheduled_s else 1
    )
    body = json.loads(encode(plan, request))
    always = {"max_tokens": 3, "temperature": 0, "ignore_eos": True, "stream": True}
    if endpoint != "generate":
        always["stream_options"] = {"include_usage": True}
    assert body == always | expected


@pytest.mark.parametrize("endpoint", ["generate", "completions", "chat"])
def test_what_a_request_asks_for_stands_in_its_body(endpoint):
    asked = {"priority": -3, "tenant": "chat", "ttft_slo_ms": 250, "tpot_slo_ms": 40.5}
    for service in (asked, {}, None):
        plan = Plan(url=URL, endpoint=endpoint, requests=[CLOSED | {"service": service}], concurrency=1)
        body = json.loads(encode(plan, plan.requests[0]))
        assert {name: value for name, value in body.items() if name in asked} == (service or {})
