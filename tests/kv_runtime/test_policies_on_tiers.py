"""Every policy on three tiers at once: native and twin decide alike, line by line, and the record replays."""

import json

import pytest

from sagellm.kv_policy.registry import make_policy, policy_names
from sagellm.replay.verify import verify_log
from tests.kv_runtime.workload import Engine, manager_of, requests
from tests.sweeps import slow_but


def lines_of(name, seed, reference):
    lines = []
    manager = manager_of(
        name, 7, 6, 10, record=lambda event, **fields: lines.append({"event": event, **fields}),
        make_policy=lambda policy, capacity, **options: make_policy(policy, capacity, reference=reference, **options),
    )  # fmt: skip
    engine = Engine(manager, 1 + seed % 3)
    for request in requests(seed, 50):
        engine.serve(*request)
        engine.check()
    assert engine.num_hits > 10
    return lines


ONLINE = [name for name in policy_names() if name != "belady"]  # which needs the future


@pytest.mark.parametrize("name", slow_but(ONLINE, "lru", "arc", "s3fifo", "gdsf"))
def test_native_and_twin_and_their_record(name, tmp_path):
    for seed in range(3):
        lines = lines_of(name, seed, reference=False)
        assert lines == lines_of(name, seed, reference=True)
        path = tmp_path / f"{seed}.jsonl"
        path.write_text("".join(json.dumps({"n": number, **line}) + "\n" for number, line in enumerate(lines)))
        report = verify_log(path)
        assert report.agrees and report.num_victims > 50
