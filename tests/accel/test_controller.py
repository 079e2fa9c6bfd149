"""The controller of quantization and speculation, on the real engine."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from sagellm import AccelController
from sagellm.accel import AccelConfig, QuantizationProfile
from sagellm.core.errors import SageError
from sagellm.demo_model.random_model import write_random_model
from sagellm.evaluate.alignment import AlignmentReport, page

SHAPE = dict(
    hidden_size=128, num_layers=2, num_heads=4, num_kv_heads=2, intermediate_size=256, vocab_size=512, dtype="float32",
    max_position_embeddings=1024,
)  # fmt: skip
SETTINGS = dict(device="cpu", threads=1, kv_blocks=64, block_size=16, max_batch_size=4)


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return write_random_model(tmp_path / "model", architecture="llama", **SHAPE)


@pytest.mark.slow
def test_quantized_once_with_its_alignment_report(model):
    controller = AccelController.setup({"enable_quantization": True, "method": "int8"}, model=model, **SETTINGS)
    folder = controller.get_quantized_model()
    report = AlignmentReport.read(folder)
    assert report.profile == QuantizationProfile.read(folder) and report.profile.method == "int8"
    quantized = report.quality.models[1]
    assert 0 < quantized.kl_mean < 0.05 and quantized.same_answers is not None
    assert report.bytes_stored[0] < 0.5 * report.bytes_stored[1]
    text = page(report)
    assert "Method int8, 8 bits" in text and "model.layers.0." in text and "KL" in text
    times = {file.name: file.stat().st_mtime_ns for file in folder.iterdir()}
    assert controller.get_quantized_model() == folder
    assert {file.name: file.stat().st_mtime_ns for file in folder.iterdir()} == times, "measured again"
    (folder / "alignment.json").write_text("{}")
    with pytest.raises(SageError, match="is damaged; remove it"):
        AlignmentReport.read(folder)


@pytest.mark.slow
def test_guesses_on_the_quantized_model(model):
    config = AccelConfig(enable_quantization=True, method="awq", options={"group_size": 32}, speculative_tokens=4)
    run = AccelController.setup(config, model=model, **SETTINGS).run_speculative_decode(["abc abc abc", "1 2 3 1 2 3"], 48)
    assert run.is_same and len(run.texts) == 2 and 0 <= run.acceptance <= 1
    assert run.tokens_per_step >= 1 and run.speedup > 0


def test_a_draft_model_that_is_the_model_guesses_all(model):
    config = {"speculative_tokens": 3, "draft_model": str(model)}
    run = AccelController.setup(config, model=model, **SETTINGS).run_speculative_decode(["some text"], 32)
    assert run.is_same and run.acceptance > 0.9 and run.tokens_per_step > 3


@pytest.mark.parametrize(
    ("config", "settings", "words"),
    [({"enable_sparsity": True, "speculative_tokens": 2}, {}, "a guess and its verification"),
     ({"method": "int8"}, {}, "belong together"),
     ({"enable_quantization": True}, {}, "belong together"),
     ({"enable_quantization": True, "method": "nf4"}, {}, "unknown quantization method"),
     ({"enable_quantization": True, "method": "awq", "options": {"group_size": 100}}, {}, "takes 32, 64, 128"),
     ({"draft_model": "smollm2"}, {}, "needs speculative_tokens"), ({"speculative_tokens": 99}, {}, "less than or equal to 64"),
     ({"bits": 3}, {}, "bits: Extra inputs"), ({"speculative_tokens": 2, "draft_model": "/nowhere"}, {}, "/nowhere"),
     ({}, {"model": "/nowhere"}, "no such folder"), ({}, {"kv_blocks": 2}, "kv_blocks"),
     ({}, {"kv_blocks": 10**9}, "free")],
)  # fmt: skip
def test_refused_before_an_engine_starts(model, config, settings, words):
    with pytest.raises(SageError, match=words):
        AccelController.setup(config, **{"model": model} | SETTINGS | settings)


def test_what_is_switched_off(model):
    controller = AccelController.setup(model=model, **SETTINGS)
    with pytest.raises(SageError, match="quantization is switched off"):
        controller.get_quantized_model()
    with pytest.raises(SageError, match="speculation is switched off"):
        controller.run_speculative_decode(["a"])
    with pytest.raises(SageError, match="no prompt"):
        AccelController.setup({"speculative_tokens": 2}, model=model, **SETTINGS).run_speculative_decode([])


@pytest.mark.slow
def test_demo_of_the_page_runs(tmp_path):
    page = (Path(__file__).parents[2] / "sagellm/accel/quantization/README.md").read_text()
    (demo,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    found = subprocess.run([sys.executable, "-c", demo], cwd=tmp_path, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr[-2000:]
    folder, acceptance, is_same = found.stdout.splitlines()[-1].rsplit(" ", 2)
    assert (Path(folder) / "alignment.json").is_file() and 0 <= float(acceptance) <= 1 and is_same == "True"
