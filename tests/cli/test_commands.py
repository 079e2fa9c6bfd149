"""The console command: what it offers, that it is quick to say so, and its exit codes."""

import importlib.util
import json
import socket
import subprocess
import sys

import pytest

from sagellm.cli import checks
from sagellm.cli.checks import MISSING, NOTE, OK, Finding
from tests.commands import run_sagellm as run


def test_help_lists_the_commands_and_loads_nothing_heavy():
    code = (
        "import sys; from sagellm.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "print(sorted({'torch', 'lmdeploy', 'transformers', 'rich'} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stderr.strip() == "[]"
    for name in ("serve", "patches", "model", "demo-model", "doctor"):
        assert name in done.stdout


@pytest.mark.parametrize("name", ["serve", "patches", "demo-model", "doctor"])
def test_every_command_explains_itself_and_has_json(name):
    done = run(name, "--help")
    assert done.exit_code == 0 and "--json" in done.output


@pytest.mark.parametrize(
    "words", [["nothing"], ["serve", "--nothing"], ["patches", "undo"], ["patches", "check", "0001"]]
)
def test_misuse(words):
    assert run(*words).exit_code == 2


def test_patches_of_the_installed_lmdeploy():
    assert run("patches").exit_code == 0
    status = json.loads(run("patches", "--json").output)
    assert status["state"] == "applied"
    assert run("patches", "check").exit_code == 0


def test_patches_says_no_where_there_is_no_lmdeploy(tmp_path):
    done = run("patches", "--target", tmp_path)
    assert done.exit_code == 1 and "no LMDeploy in" in done.output
    assert run("patches", "apply", "--target", tmp_path).exit_code == 1


def test_doctor_finds_a_machine_that_can_serve():
    done = run("doctor", "--json")
    document = json.loads(done.output)
    assert done.exit_code == 0 and document["ready"]
    found = {check["name"]: check["state"] for check in document["checks"]}
    assert found["python"] == found["lmdeploy"] == found["patches"] == found["torch"] == found["devices"] == OK
    assert {"gpu", "turbomind", "cpu", "memory", "disk", "default model", "demo model", "port", "plug-ins"} <= set(found)
    (turbomind,) = [check for check in document["checks"] if check["name"] == "turbomind"]
    if turbomind["state"] != OK:
        assert "TurboMind" in turbomind["text"] and "the PyTorch engine serves" in turbomind["text"]
        assert "git submodule update --init third_party/lmdeploy" in turbomind["command"]
    table = run("doctor")
    assert table.exit_code == 0 and "The server can run" in table.output


def test_doctor_names_what_is_missing_and_the_command(monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "torch" else real(name, *more))
    monkeypatch.setattr(checks, "engines", lambda: [])
    done = run("doctor", "--json")
    document = json.loads(done.output)
    assert done.exit_code == 1 and not document["ready"]
    (torch,) = [check for check in document["checks"] if check["name"] == "torch"]
    assert torch["state"] == MISSING and torch["command"].startswith("./apply_patches.sh")


def test_a_check_that_fails_is_a_note(monkeypatch):
    def broken():
        raise OSError("no such device")

    for name in ("torch", "engines"):
        monkeypatch.setattr(checks, name, broken)
    done = run("doctor", "--json")
    assert "no such device" in done.output and json.loads(done.output)["ready"]


def test_a_taken_port_is_noted():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        (found,) = checks.port(other.getsockname()[1])
    assert isinstance(found, Finding) and found.state == NOTE and "--port" in found.command
