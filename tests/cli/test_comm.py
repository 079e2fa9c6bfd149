"""`sagellm comm`: what it lists, what it says about a backend, and its exit codes."""

import json

import pytest
from click.testing import CliRunner

from sagellm.cli import main
from sagellm.comm_backend.kv_transfer.registry import channel_names
from sagellm.comm_backend.registry import backend_names, find_backend

BAD = """
from sagellm.comm_backend.memory import MemoryBackend
class FromZero(MemoryBackend):
    def _start_broadcast(self, tensor, src, timeout_s):
        return super()._start_broadcast(tensor, 0, timeout_s)
"""


def run(*arguments):
    return CliRunner().invoke(main, ["comm", *(str(argument) for argument in arguments)])


@pytest.fixture
def here(tmp_path, monkeypatch):
    (tmp_path / "backend_of_a_test.py").write_text(BAD)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path / "elsewhere")  # undone afterwards, with what the command adds


def test_list():
    done = run("list", "--json")
    rows = {row["backend"]: row for row in json.loads(done.output)}
    assert done.exit_code == 0 and list(rows) == backend_names()
    assert rows["memory"]["here"] == rows["gloo"]["here"] == "yes" and rows["gloo"]["devices"] == "cpu"
    assert rows["nccl"]["here"] == (find_backend("nccl").missing() or "yes")
    assert rows["memory"]["summary"] == "Ranks that are threads of this process."
    table = run("list")
    assert table.exit_code == 0 and all(name in table.output for name in backend_names())


def test_a_good_backend():
    done = run("check", "Memory", "--ranks", 2, "--rounds", 1, "--json")
    document = json.loads(done.output)
    assert done.exit_code == 0 and document["passed"] and document["backend"] == "Memory"
    assert all(rule["passed"] and rule["message"] == "" for rule in document["rules"]) and document["event_us"] > 0


def test_a_bad_backend_in_this_folder(here):
    done = run("check", "backend_of_a_test:FromZero", "--rounds", 1, "--seed", 7)
    assert done.exit_code == 1 and "does not keep to the contract" in done.output
    assert "broadcast from 1 gave" in " ".join(done.output.split()) and "seed 7" in " ".join(done.output.split())


def test_one_that_cannot_work_here_or_has_no_such_option():
    done = run("check", "memory", "--options", '{"size": 1}', "--json")
    builds = json.loads(done.output)["rules"][0]
    assert done.exit_code == 1 and builds["rule"] == "builds" and "memory has none" in builds["message"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing"], "known are: memory, gloo"),
        (["backend_of_a_test:Missing"], "has no Missing"),
        (["memory", "--options", "{"], "is not JSON"),
        (["memory", "--ranks", "1"], "1 is not in the range"),
        (["memory", "--rounds", "0"], "0 is not in the range"),
        (["memory", "--limit-s", "nan"], "not a finite number above 0"),
        ([], "Missing argument"),
    ],
)
def test_misuse(here, arguments, message):
    done = run("check", *arguments)
    assert done.exit_code == 2 and message in " ".join(done.output.replace("│", " ").split())


def test_channels():
    done = run("channels", "--json")
    rows = {row["channel"]: row for row in json.loads(done.output)}
    assert done.exit_code == 0 and list(rows) == channel_names()
    assert rows["shm"]["here"] == rows["tcp"]["here"] == "yes" and rows["tcp"]["devices"] == "cpu"
    assert rows["tcp"]["class"] == "sagellm.comm_backend.kv_transfer.tcp:TcpChannel"


BAD_CHANNEL = """
from sagellm.comm_backend.kv_transfer.shm import ShmChannel
class Unbuilt(ShmChannel):
    def _open(self):
        raise RuntimeError("no")
"""


def test_a_channel_that_breaks_its_contract(tmp_path, here):
    (tmp_path / "channel_of_a_test.py").write_text(BAD_CHANNEL)
    done = run("check-channel", "channel_of_a_test:Unbuilt", "--json", "--rounds", 1)
    assert done.exit_code == 1
    assert "RuntimeError: no" in done.output and "scenario starting" in done.output
    unknown = run("check-channel", "pigeon")
    assert unknown.exit_code == 2 and "known are: shm, tcp" in unknown.output
