"""`sagellm quantize`."""

import json
from functools import partial
from pathlib import Path

import pytest

from sagellm.demo_model.random_model import write_random_model
from tests.commands import run_sagellm

SHAPE = dict(
    hidden_size=128, num_layers=1, num_heads=4, num_kv_heads=2, intermediate_size=256, vocab_size=512, dtype="bfloat16",
    max_position_embeddings=1024,
)  # fmt: skip


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return write_random_model(tmp_path / "model", architecture="llama", **SHAPE)


run = partial(run_sagellm, "quantize")


def test_a_copy_and_its_report(model, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("words of a text to calibrate with. " * 100)
    out = tmp_path / "out"
    calibration = ("--calibration", text, "--pieces", 4, "--length", 32)
    result = run(model, "--method", "awq", "--options", '{"group_size": 32}', "--out", out, *calibration)
    assert (result.exit_code, result.stdout.strip()) == (0, str(out)), result.output
    profile = json.loads((out / "quantization_profile.json").read_text())
    assert profile["group_size"] == 32 and profile["calibration"]["source"] == str(text)
    result = run("--report", out, "--device", "cpu", "--tokens", 1024, "--answers", 0)
    assert result.exit_code == 0 and "Method awq, 4 bits, group size 32, 7 layers." in result.stdout, result.output
    result = run("--report", out, "--device", "cpu", "--tokens", 1024, "--answers", 0, "--json")
    assert json.loads(result.stdout)["quality"]["models"][1]["kl_mean"] > 0


def test_the_cache(model):
    first, second = (run(model, "--method", "int8", "--json") for _ in range(2))
    assert first.exit_code == 0 and first.stdout == second.stdout
    folder = Path(json.loads(first.stdout)["folder"])
    assert (folder / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [((), "give the MODEL"), (("MODEL",), "give the MODEL to quantize and its --method"),
     (("MODEL", "--method", "nf4"), "unknown quantization method"), (("/nowhere", "--method", "int8"), "no such folder"),
     (("MODEL", "--method", "awq", "--options", "[]"), "--options"),
     (("MODEL", "--method", "awq", "--calibration", "/nowhere"), "cannot be read"),
     (("--report", "/nowhere"), "cannot be read"), (("MODEL", "--report", "/nowhere"), "takes no MODEL")],
)  # fmt: skip
def test_misuse(model, arguments, words):
    result = run(*(str(model) if each == "MODEL" else each for each in arguments))
    assert result.exit_code == 2 and words in result.output.replace("\n", " "), result.output
