"""Mistakes at the start: exit code 2, one clear message, and nothing left behind.

A process is started where it is the process that is looked at. The command in this one stands for the others: importing
the libraries once more for each of them would show nothing.
"""

import os
import shutil
import socket
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner

from benchmarks.processes import free_port
from sagellm.serve import command, server

HERE = "tests.serve.plugins"


@pytest.fixture
def refused(launch, tmp_path):
    """Start a process with these options and return the message."""

    def start(*options, model="llama", env=None):
        server = launch(*options, model=model, env=env)
        server.end(None, code=2)
        assert server.stdout == ""
        assert "Traceback" not in server.stderr
        assert server.stderr.count("rror: ") == 1, server.stderr
        return server.stderr

    return start


class Unwatched:
    """In the place of what takes the signals of a process over, for as long as that lives."""

    def __init__(self, clean_up):
        pass

    def wait_for_stop(self):
        pass

    def cancel(self):
        pass


@pytest.fixture
def refused_here(monkeypatch, model_folder, tmp_path):
    """The same without a process."""
    own = tmp_path / "own"
    own.mkdir()
    monkeypatch.setattr(command, "stop_at_once", lambda: None)
    monkeypatch.setattr(server, "Loading", Unwatched)
    monkeypatch.setattr(sys, "path", [*sys.path])  # the command adds to it
    monkeypatch.setattr(tempfile, "tempdir", str(own))

    def start(*options, model="llama"):
        given = ["--device", "cpu", "--block-size", 16, "--port", free_port()]
        if model is not None:
            given += ["--model", model_folder(model)]
        before = psutil.Process().children(recursive=True)
        done = CliRunner().invoke(command.serve, [str(word) for word in (*given, *options)])
        assert isinstance(done.exception, SystemExit) and done.exit_code == 2, done.output
        assert done.stdout == "" and done.stderr.count("rror: ") == 1, done.output
        # torch makes this folder when a size needs the operators of the CPU device; it is empty and not ours.
        left = [path for path in own.iterdir() if not path.name.startswith("torchinductor_")]
        assert psutil.Process().children(recursive=True) == before and not left
        return done.stderr

    return start


def test_the_port_is_taken(refused):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        message = refused("--port", port)
    assert f"port {port}" in message and "Choose another --port" in message


def test_the_temporary_directory_is_too_deep_for_sockets(refused, tmp_path):
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    message = refused("--tensor-parallel", 2, env={"TMPDIR": str(deep)})
    assert "is too deep" in message and "Set TMPDIR" in message and not list(deep.iterdir())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--plugin", "nobody"], ["unknown plug-in 'nobody'", "module:Class"]),
        (["--plugin", "no_such_module:X"], ["no_such_module"]),
        (["--plugin", f"{HERE}:Nobody"], ["has no Nobody"]),
        (["--plugin", "pathlib:Path"], ["subclass"]),
        (["--plugin", f"{HERE}:Evicting"], ["Evicting", "size"]),
        (["--plugin", f"{HERE}:Counting", "--plugin", f"{HERE}:Counting"], ["named twice"]),
        (["--record", "/no/such/folder/record"], ["--record", "No such file"]),
        (["--model", "/no/such/model"], ["/no/such/model: there is no such folder or file", "hub id"]),
        (["--device", "cpu", "--dtype", "float16"], ["float16", "bfloat16"]),
        (["--context-length", 4096], ["4096", "2048"]),
        (["--block-size", 17], ["17 is not a power of two"]),
        (["--device", "abacus"], ["abacus"]),
        (["--kv-policy", "lru", "--no-prefix-caching"], ["prefix_caching is off"]),
        (["--kv-disk", "/no/such/disk"], ["/no/such/disk", "give --host-kv-blocks"]),
        (["--kv-policy-options", "{"], ["--kv-policy-options", "is not JSON"]),
        (["--strategy", "nonsense"], ["known are: adaptive", "slo_aware"]),
        (["--speculative", "nonsense"], ["known are: chain, draft", "suffix"]),
        (["--speculative", "eagle3", "--device", "cpu"], ["eagle3"]),
        (
            ["--speculative", "ngram", "--speculative-options", '{"lookahead": 64}', "--kv-blocks", 16, "--decode-round", 4],
            ["lookahead of 64", "is 256 tokens", "the pool of 16 blocks holds 256"],
        ),
        (["--speculative", "draft"], ["draft has no model", "--speculative-options", '"model": "FOLDER"']),
        (["--speculative", "dynamic:draft"], ["draft has no model", '"options": {"model": "FOLDER"}']),
        (["--speculative", "ngram", "--speculative-options", '{"lookahead": 0}'], ["lookahead is 0", "1 to 64"]),
        (["--speculative-options", "{}x"], ["--speculative-options", "is not JSON"]),
        (["--role", "decode"], ["role decode needs the proxy of its group; give --proxy-url"]),
        (["--role", "decode", "--proxy-url", "http://127.0.0.1:1"], ["give --pd-key-file FILE"]),
        (["--kv-channel", "tcp"], ["no role; give --role"]),
        (["--kv-channel", "tcp", "--pd-key-file", "k"], ["no role; give --role"]),
        (["--pd-key-file", "/no/such/key"], ["cannot read the key file /no/such/key"]),
        (["--kv-channel-options", "{"], ["--kv-channel-options", "is not JSON"]),
        (["--role", "boss"], ["boss", "prefill"]),
        (["--role", "decode", "--proxy-url", "here", "--pd-key-file", "k"], ["give http://host:port, got 'here'"]),
        (
            ["--role", "decode", "--proxy-url", "http://127.0.0.1:1", "--pd-key-file", "/no/such/key"],
            ["cannot read the key file /no/such/key"],
        ),
        (["--kv-blocks", 10**9], ["1000000000 KV blocks", "MiB", "Ask for at most"]),
    ],
)
def test_values_that_cannot_work(refused_here, options, words):
    message = refused_here(*options)
    for word in words:
        assert word in message


@pytest.mark.slow
def test_a_disk_tier_too_small_for_a_block(refused, tmp_path):
    message = refused("--host-kv-blocks", 8, "--kv-disk", tmp_path / "tier", "--kv-disk-gib", 1e-6)
    assert "no room for one block" in message and "--kv-disk-gib" in message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("modle: x\n", ["modle: unknown key", "model_name"]),
        ("port: [1\n", ["is not YAML"]),
        ("- 1\n", ["holds a list"]),
        ("kv_memory_share: 2\n", ["kv_memory_share", "2"]),
        (
            f"plugins: [{{name: '{HERE}:Evicting', options: {{size: 1}}}}, '{HERE}:AlsoEvicting']\n",
            ["both decide select_victims"],
        ),
    ],
)
def test_configuration_files_that_cannot_work(refused_here, tmp_path, text, words):
    file = tmp_path / "config.yaml"
    file.write_text(text)
    message = refused_here("--config", file)
    for word in words:
        assert word in message


def test_no_gpu(refused_here):
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert "torch sees no GPU" in refused_here("--device", "cuda", model=None)


def test_a_folder_that_is_not_a_model(refused_here, tmp_path):
    folder = tmp_path / "empty"
    folder.mkdir()
    assert "has no config.json" in refused_here("--model", folder)


def test_an_unpatched_lmdeploy(refused, tmp_path):
    """A copy of the installed one, taken back to what its authors ship; only its small files are needed."""
    from sagellm.patching import default_target, reverse

    copy = tmp_path / "site" / "lmdeploy"
    shutil.copytree(default_target(), copy, ignore=shutil.ignore_patterns("__pycache__", "lib", "bin", "*.so"))
    reverse(copy)
    path = os.pathsep.join([str(copy.parent), str(Path(__file__).parents[2])])
    message = refused(env={"PYTHONPATH": path})
    assert "is not applied" in message and "Run: " in message


@pytest.mark.slow
def test_turbomind_where_it_cannot_run(refused, tmp_path):
    """LMDeploy's wheel has no hook table; the sentence says what is missing here, and the step that comes next."""
    begun = time.monotonic()
    message = refused("--engine", "turbomind", model=None)
    assert time.monotonic() - begun < 30, "it looks at the machine and loads no model"
    assert "TurboMind" in message and "--engine pytorch" in message
    assert "git submodule update --init third_party/lmdeploy" in message and "./apply_patches.sh" in message
