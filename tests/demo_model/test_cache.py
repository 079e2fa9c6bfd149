"""Building once: determinism, cache hits, interrupted and concurrent builds."""

import hashlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from sagellm.core.cached_folder import default_cache_dir
from sagellm.demo_model import DemoModelError, DemoRecipe, ensure_demo_model
from sagellm.demo_model import cache as cache_module
from sagellm.demo_model.base import RECORD_NAME, read_record
from sagellm.demo_model.cache import build_at

# Builds the recipe given as JSON in a process of its own; says "training" once the training has begun.
CHILD = """
import sys, time
from sagellm.demo_model import DemoRecipe, ensure_demo_model, train
real = train._train
def spy(recipe, model, windows, tick):
    print("training", flush=True)
    sys.stdin.readline()
    return real(recipe, model, windows, tick)
train._train = spy
print(ensure_demo_model(sys.argv[1], recipe=DemoRecipe.model_validate_json(sys.argv[2])), flush=True)
"""


def start_child(folder: Path, recipe: DemoRecipe) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, str(folder), recipe.model_dump_json()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def weights_hash(folder: Path) -> str:
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def visible(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))


@pytest.mark.slow
def test_same_recipe_same_bytes(tmp_path: Path, tiny_recipe: DemoRecipe, tiny_folder: Path):
    again = ensure_demo_model(tmp_path, recipe=tiny_recipe)
    assert weights_hash(again) == weights_hash(tiny_folder)
    assert (again / "tokenizer.json").read_bytes() == (tiny_folder / "tokenizer.json").read_bytes()
    other = ensure_demo_model(tmp_path, recipe=tiny_recipe.model_copy(update={"seed": 1}))
    assert other != again and weights_hash(other) != weights_hash(again)


def test_training_leaves_the_callers_random_state_and_threads(tmp_path: Path, tiny_recipe: DemoRecipe):
    import torch

    before, threads = torch.get_rng_state(), torch.get_num_threads()
    ensure_demo_model(tmp_path, recipe=tiny_recipe)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.get_num_threads() == threads


def test_cache_hit_does_not_train(tiny_recipe: DemoRecipe, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cache_module, "build_corpus", lambda recipe: pytest.fail("built again"))
    assert ensure_demo_model(tiny_folder.parent, recipe=tiny_recipe) == tiny_folder


def test_failed_build_leaves_nothing(tmp_path: Path, tiny_recipe: DemoRecipe, monkeypatch: pytest.MonkeyPatch):
    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr("sagellm.demo_model.train.train_and_save", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ensure_demo_model(tmp_path, recipe=tiny_recipe)
    assert [path.suffix for path in tmp_path.iterdir()] == [".lock"]


@pytest.mark.slow
def test_killed_build_is_recovered(tmp_path: Path, tiny_recipe: DemoRecipe):
    with start_child(tmp_path, tiny_recipe) as child:
        assert child.stdout.readline() == "training\n"
        os.kill(child.pid, signal.SIGKILL)
    assert visible(tmp_path) == []
    assert any(".building-" in path.name for path in tmp_path.iterdir())
    folder = ensure_demo_model(tmp_path, recipe=tiny_recipe)
    assert visible(tmp_path) == [folder.name]
    assert not any(".building-" in path.name for path in tmp_path.iterdir())


@pytest.mark.slow
def test_two_processes_train_once(tmp_path: Path, tiny_recipe: DemoRecipe):
    with start_child(tmp_path, tiny_recipe) as first:
        assert first.stdout.readline() == "training\n"  # it holds the lock from here on
        with start_child(tmp_path, tiny_recipe) as second:
            first_out, _ = first.communicate("go on\n")
            second_out, _ = second.communicate("go on\n")
    assert first_out == second_out == f"{tmp_path / tiny_recipe.folder_name()}\n"
    assert (first.returncode, second.returncode) == (0, 0)


@pytest.mark.slow
def test_force_trains_again(tmp_path: Path, tiny_recipe: DemoRecipe):
    folder = tmp_path / "model"
    assert build_at(folder, tiny_recipe)[1] is False
    inode = folder.stat().st_ino
    assert build_at(folder, tiny_recipe)[1] is True
    assert build_at(folder, tiny_recipe, force=True)[1] is False
    assert folder.stat().st_ino != inode
    assert visible(tmp_path) == ["model"]


def test_another_recipes_folder_needs_force(tmp_path: Path, tiny_recipe: DemoRecipe, tiny_folder: Path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / RECORD_NAME).write_text((tiny_folder / RECORD_NAME).read_text())
    other = tiny_recipe.model_copy(update={"seed": 1})
    with pytest.raises(DemoModelError, match="another recipe.*--force"):
        build_at(tmp_path / "model", other)
    build_at(tmp_path / "model", other, force=True)
    assert read_record(tmp_path / "model").key == other.key()


@pytest.mark.parametrize("force", [False, True])
def test_other_folders_are_never_overwritten(tmp_path: Path, tiny_recipe: DemoRecipe, force: bool):
    (tmp_path / "thesis.txt").write_text("precious")
    with pytest.raises(DemoModelError, match="is not a demo model; allowed are"):
        build_at(tmp_path, tiny_recipe, force=force)
    assert (tmp_path / "thesis.txt").read_text() == "precious"


def test_unwritable_place_is_a_clear_error(tmp_path: Path, tiny_recipe: DemoRecipe):
    (tmp_path / "file").touch()
    with pytest.raises(DemoModelError, match="cannot be written to .* Choose a folder"):
        build_at(tmp_path / "file" / "model", tiny_recipe)


def test_default_cache_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert default_cache_dir() == tmp_path / "xdg" / "sagellm"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert default_cache_dir() == tmp_path / "home" / ".cache" / "sagellm"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_cache_dir() == tmp_path / "home" / ".cache" / "sagellm"


@pytest.mark.parametrize("text", ["", "{}", json.dumps({"key": 1})])
def test_unreadable_record_is_no_record(tmp_path: Path, text: str):
    (tmp_path / RECORD_NAME).write_text(text)
    assert read_record(tmp_path) is None
