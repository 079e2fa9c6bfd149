"""Tests of the layout, which tells one model's files from another's. A change in any input of blocks changes the layout."""

import json
import os

import pytest

from sagellm.core import file_hashes
from sagellm.core.config import SageConfig
from sagellm.core.file_hashes import CACHE_NAME
from sagellm.engines.lmdeploy import layout
from sagellm.engines.lmdeploy.layout import layout_of
from sagellm.engines.lmdeploy.sizing import size_engine
from tests.engines.lmdeploy.test_sizing import write_weights

SHAPE = dict(num_attention_heads=2, num_hidden_layers=1, hidden_size=64, max_position_embeddings=256, dtype="float32")


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SHAPE))
    write_weights(folder / "model.safetensors", 1 << 20)
    for name in ("old.pt", "some.gguf", "modeling.py", "tokenizer.json"):
        (folder / name).write_bytes(bytes(1 << 20))
    return folder


def line(model, cache=None, device="cpu", **values):
    config = SageConfig(device="cpu", kv_blocks=16, **values)
    return layout_of(model, config, size_engine(config, model, "cpu"), device, cache)


def patch(file, place):
    with file.open("r+b") as content:
        content.seek(place)
        content.write(b"\1")


@pytest.mark.parametrize("name", ["model.safetensors", "old.pt", "some.gguf", "modeling.py"])
def test_a_byte_anywhere_counts(model, tmp_path, name):
    before = line(model, tmp_path)
    patch(model / name, 300_000)
    assert line(model, tmp_path) != before
    assert line(model, tmp_path) == line(model)


def test_what_computes_counts_and_a_tokenizer_does_not(model, monkeypatch):
    before = line(model)
    patch(model / "tokenizer.json", 5)
    assert line(model) == before
    assert line(model, device="cuda") != before
    assert line(model, dtype="bfloat16") != before and line(model, weights="packed") != before
    monkeypatch.setattr(layout, "__version__", "0.0.0")
    assert line(model) != before


def test_what_has_not_changed_is_read_once(model, tmp_path, monkeypatch):
    cache, hashed = tmp_path / "new", []
    real = file_hashes._hash
    monkeypatch.setattr(file_hashes, "_hash", lambda file: hashed.append(file.name) or real(file))
    first = line(model, cache)
    assert len(hashed) == 5
    assert line(model, cache) == first and len(hashed) == 5
    times = (model / "old.pt").stat()
    patch(model / "old.pt", 7)
    os.utime(model / "old.pt", ns=(times.st_atime_ns, times.st_mtime_ns))
    assert line(model, cache) != first and hashed[5:] == ["old.pt"]
    (cache / CACHE_NAME).write_text("[1")
    assert line(model, cache) == line(model)
