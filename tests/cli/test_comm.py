"""`sagellm comm measure`, with real processes."""

import json
import math

import pytest
from click.testing import CliRunner

from sagellm.cli.main import main


@pytest.mark.slow
def test_backends_are_measured_and_drawn(tmp_path):
    plot = tmp_path / "comm.png"
    done = CliRunner().invoke(main, ["comm", "measure", "--rounds", "1", "--json", "--plot", str(plot)])
    assert done.exit_code == 0, done.output
    result = json.loads(done.output)
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert result["ranks"] == 2 and result["topology_s"] > 0
    assert result["candidates"] == ["group", "shm"] and "the memory of one host" in result["reason"]
    for kind, name in result["chosen"].items():
        times = {each: [one["p50_s"] for one in result["backends"][each][kind].values()] for each in ("gloo", "shm")}
        assert min(times, key=lambda each: math.prod(times[each])) == {"group": "gloo"}.get(name, name)
    assert result["chosen"].keys() == {"all_reduce", "all_gather"}
    for name in ("shm", "gloo"):
        found = result["backends"][name]
        for kind in ("all_reduce", "all_gather"):
            assert len(found[kind]) == 6 and all(0 < each["p50_s"] <= each["p99_s"] for each in found[kind].values())
        assert 0 < found["message_s"]["p50_s"] <= found["message_s"]["p99_s"] and found["hidden"] <= 1.5


def test_a_backend_that_does_not_work_between_processes_is_refused():
    done = CliRunner().invoke(main, ["comm", "measure", "--backends", "shm,memory"])
    assert done.exit_code == 1 and "memory does not work here between processes" in done.output
