"""A strategy in the server: what clients ask of it comes to its decisions, and both are on record."""

import json

from tests.serve.test_plugins import generate


def test_requests_of_the_api_are_scheduled_by_the_strategy(launch, tmp_path):
    record = tmp_path / "record.jsonl"
    server = launch("--strategy", "priority", "--strategy-options", '{"ageing_s": 5}', "--record", record).ready()
    client = server.client()
    model = client.models.list().data[0].id
    asked = {"priority": -7, "tenant": "acme", "ttft_slo_ms": 900}
    body = {"max_tokens": 8, "extra_body": {"ignore_eos": True, **asked}}
    answer = client.chat.completions.create(model=model, messages=[{"role": "user", "content": "Hello"}], **body)
    assert answer.usage.completion_tokens == 8
    generate(server)
    server.wait_idle()
    server.end()
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    first, second = [line for line in lines if line["event"] == "arrive"]
    assert first["tenant"] == "acme" and first["service"] == {"priority": -7, "ttft_s": 0.9} and "service" not in second
    decisions = [line for line in lines if line["event"] == "schedule"]
    plans = [line for line in lines if line["event"] == "plan"]
    assert decisions and plans and {line["strategy"] for line in plans} == {"priority"}
    assert all(line["queue"] and line["reason"] for line in decisions)
    assert not [line for line in lines if line["event"] == "fault"]
