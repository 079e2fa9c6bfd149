"""The folder that comes out: layout, chat template, loading and generating; and the command."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from sagellm.demo_model import DemoRecipe
from sagellm.demo_model.base import read_record
from sagellm.demo_model.command import demo_model
from sagellm.demo_model.tokenizer import BOS, EOS

USER = [{"role": "user", "content": "Write a function."}]
PROMPT = f"{BOS}<|user|>Write a function.{EOS}<|assistant|>"


@pytest.fixture(scope="module")
def tokenizer(tiny_folder: Path):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_folder)


def test_layout(tiny_folder: Path):
    config = json.loads((tiny_folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config.get("torch_dtype", config.get("dtype")) == "float32"
    assert config["tie_word_embeddings"] is True
    assert "chat_template" in json.loads((tiny_folder / "tokenizer_config.json").read_text())
    assert json.loads((tiny_folder / "generation_config.json").read_text())["eos_token_id"] == 1
    assert read_record(tiny_folder).steps == 3
    assert {path.stat().st_mode & 0o777 for path in tiny_folder.iterdir()} == {0o644}


def test_prompt(tokenizer):
    assert tokenizer.apply_chat_template(USER, tokenize=False, add_generation_prompt=True) == PROMPT
    talk = [{"role": "system", "content": "Be brief."}, *USER, {"role": "assistant", "content": "pass"}]
    assert tokenizer.apply_chat_template(talk, tokenize=False) == (
        f"{BOS}<|system|>Be brief.{EOS}<|user|>Write a function.{EOS}<|assistant|>pass{EOS}"
    )


def test_content_in_parts_or_absent(tokenizer):
    parts = [{"role": "user", "content": [{"type": "text", "text": "Write "}, {"type": "text", "text": "a function."}]}]
    assert tokenizer.apply_chat_template(parts, tokenize=False, add_generation_prompt=True) == PROMPT
    assert tokenizer.apply_chat_template([{"role": "assistant", "content": None}], tokenize=False) == (
        f"{BOS}<|assistant|>{EOS}"
    )


def test_unknown_role_is_refused(tokenizer):
    from jinja2 import TemplateError

    with pytest.raises(TemplateError, match="got role wizard; allowed are system"):
        tokenizer.apply_chat_template([{"role": "wizard", "content": "x"}], tokenize=False)


def test_bos_appears_once(tokenizer):
    # The two ways in which servers make the ids of a chat.
    direct = tokenizer.apply_chat_template(USER, add_generation_prompt=True)
    assert tokenizer.encode(PROMPT, add_special_tokens=True) == direct
    assert direct.count(tokenizer.bos_token_id) == 1 and direct[0] == tokenizer.bos_token_id
    assert tokenizer.decode(direct) == PROMPT


@pytest.mark.parametrize("text", ["def f(x):\n    return x  # é\n", "\t\n 日本語 🙂", "n't . ,"])
def test_any_text_survives(tokenizer, text: str):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_loads_and_generates(tiny_folder: Path, tokenizer):
    import torch
    from transformers import AutoModelForCausalLM

    model, report = AutoModelForCausalLM.from_pretrained(tiny_folder, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert model.dtype == torch.float32
    ids = tokenizer.apply_chat_template(USER, add_generation_prompt=True, return_tensors="pt")
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=5, do_sample=False)
    assert out.shape[1] > ids.shape[1]


def test_importing_needs_no_torch():
    code = "import sys, sagellm.demo_model; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_command(tmp_path: Path, tiny_recipe: DemoRecipe, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = CliRunner().invoke(demo_model, ["--json", "--steps", "2"], obj=tiny_recipe)
    answer = json.loads(first.stdout)
    assert first.exit_code == 0 and first.stderr == ""
    assert set(answer) == {"path", "parameters", "seconds", "loss", "cached"}
    assert Path(answer["path"]).parent == tmp_path / "sagellm" and answer["cached"] is False
    assert read_record(Path(answer["path"])).steps == 2
    again = CliRunner().invoke(demo_model, ["--json", "--steps", "2"], obj=tiny_recipe)
    assert json.loads(again.stdout) == {**answer, "cached": True}
    plain = CliRunner().invoke(demo_model, ["--steps", "2"], obj=tiny_recipe)
    assert plain.stdout == answer["path"] + "\n"


def test_command_out_and_draft(tmp_path: Path, tiny_recipe: DemoRecipe, tiny_folder: Path):
    done = CliRunner().invoke(demo_model, ["--out", str(tmp_path / "here"), "--draft"], obj=tiny_recipe)
    assert (done.exit_code, done.stdout) == (0, f"{tmp_path / 'here'}\n")
    assert (tmp_path / "here" / "model.safetensors").is_file()
    # A model of its own that speaks of tokens by the same numbers.
    assert (tmp_path / "here" / "tokenizer.json").read_bytes() == (tiny_folder / "tokenizer.json").read_bytes()
    assert read_record(tmp_path / "here").parameters < read_record(tiny_folder).parameters
    assert read_record(tmp_path / "here").key == tiny_recipe.draft().key() != tiny_recipe.key()


@pytest.mark.parametrize("arguments", [["--steps", "0"], ["--steps", "many"], ["--nonsense"], ["--out", __file__]])
def test_misuse_exits_2(arguments: list[str]):
    done = CliRunner().invoke(demo_model, arguments)
    assert done.exit_code == 2 and "Usage:" in done.stderr


def test_failure_exits_1(tmp_path: Path, tiny_recipe: DemoRecipe):
    (tmp_path / "thesis.txt").touch()
    done = CliRunner().invoke(demo_model, ["--out", str(tmp_path)], obj=tiny_recipe)
    assert done.exit_code == 1 and "is not a demo model" in done.stderr
    done = CliRunner().invoke(demo_model, ["--out", str(tmp_path), "--json"], obj=tiny_recipe)
    assert done.exit_code == 1 and "is not a demo model" in json.loads(done.stdout)["error"]
