"""`sagellm plan`: sizes against an engine's, what fits, losses, and refusals."""

import json
from functools import partial

import pytest

from benchmarks.quantization import packed_bytes
from sagellm.accel.quantization import make_quantizer
from sagellm.accel.quantization.cache import quantized_copy
from sagellm.demo_model.random_model import write_random_model
from sagellm.engines.lmdeploy.plan import PLAIN, choices
from tests.commands import run_sagellm
from tests.sweeps import slow_but

SHAPE = dict(
    num_layers=2, num_heads=4, num_kv_heads=2, head_dim=64, hidden_size=256, intermediate_size=384, vocab_size=512,
    max_position_embeddings=2048, dtype="bfloat16",
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("model") / "model"
    write_random_model(place, architecture="llama", **SHAPE)
    return place


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "plan-cache"))


plan = partial(run_sagellm, "plan")


@pytest.mark.parametrize("method", slow_but([PLAIN, "int8", "fp8", "awq"], PLAIN, "int8"))
def test_sizes_are_those_of_the_engine(start_engine, folder, method):
    model = folder if method == PLAIN else quantized_copy(folder, make_quantizer(method))
    engine = start_engine(model=model, dtype="bfloat16", kv_schema="int8", block_size=64)
    (choice,) = (one for one in choices(folder, 1000, 3) if (one.method, one.schema.dtype) == (method, "int8"))
    assert choice.schema == engine.info.kv_schema
    assert choice.kv_bytes == 3 * 16 * engine.info.kv_schema.block_bytes
    # An embedding of its own is no packed matrix.
    embedding = 2 * SHAPE["vocab_size"] * SHAPE["hidden_size"]
    assert choice.weight_bytes - packed_bytes(engine) in (0, embedding)


def test_what_fits_is_timed_and_the_rest_is_listed(folder):
    found = choices(folder, 1024, 4)
    sizes = sorted(choice.num_bytes for choice in found)
    done = plan(folder, "--memory", f"{sizes[5] / 2**20 + 0.01}MiB", "--context", 1024, "--concurrency", 4, "--json")
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout)
    assert len(rows) == len(found)
    fitting = [row for row in rows if row["fits"]]
    assert sum(size <= sizes[5] for size in sizes) == len(fitting) and rows[: len(fitting)] == fitting
    steps = [row["step_ms"] for row in fitting]
    assert steps == sorted(steps) and min(steps) > 0
    assert {row["step_ms"] for row in rows[len(fitting) :]} == {"-"} and {row["kl"] for row in rows} == {"-"}


def test_losses_are_measured_once(folder, monkeypatch):
    words = [folder, "--memory", "1GiB", "--context", 256, "--concurrency", 2]
    rows = json.loads(plan(*words, "--measure", 1, "--json").stdout)
    assert rows[0]["kl"] > 0 and rows[0]["perplexity"].count("%") == 2
    monkeypatch.setattr("sagellm.evaluate.losses.measure_loss", None)
    again = json.loads(plan(*words, "--json").stdout)
    key = ("weights", "kv_schema")
    assert {tuple(row[name] for name in key): row["kl"] for row in again}[tuple(rows[0][name] for name in key)] == rows[0]["kl"]


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["--memory", "1MiB", "--context", 2048], 1, "nothing fits into 1 MiB; the smallest choice needs"),
        (["--memory", "two"], 2, "'two' is not a size above 0; write 2GiB"),
        (["--memory", "1GiB", "--context", 4096], 2, "context 4096 exceeds the 2048 tokens"),
    ],
)
def test_what_is_refused(folder, words, code, says):
    done = plan(folder, *words)
    assert done.exit_code == code and says in done.stderr


def test_a_quantized_model_is_refused(folder):
    done = plan(quantized_copy(folder, make_quantizer("int8")), "--memory", "1GiB", "--context", 64)
    assert done.exit_code == 2 and "it is quantized already" in done.stderr
