"""Tests of the values that `--model` takes, the messages about other values, and the models on this machine."""

import errno
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import requests
import torch
from click.testing import CliRunner
from huggingface_hub import constants, errors

from sagellm.cli import main
from sagellm.models import ModelError, find_model, packaged, prepare_model
from sagellm.models.convert import convert_gguf
from sagellm.models.folder import check_folder, num_weights
from sagellm.models.local import remove_model
from tests.commands import run_sagellm

run = partial(run_sagellm, "model")


def test_names_folders_and_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "smollm2").mkdir()
    (tmp_path / "mine.gguf").write_bytes(b"GGUF")
    file = packaged.packaged_file()
    assert find_model(None)[:3] == find_model("smollm2")[:3] == ("packaged", "smollm2", str(file))
    assert find_model("./smollm2")[:2] == ("folder", "smollm2")
    assert find_model("demo")[:2] == ("demo", "sagellm-demo")
    assert find_model("mine.gguf")[:2] == ("gguf", "mine")
    assert find_model("org/name@main")[:3] == ("hub", "org/name", "org/name@main")
    with pytest.raises(ModelError, match=r"no such folder or file; allowed are smollm2, demo, a Hugging Face folder"):
        find_model("nothing.gguf")
    with pytest.raises(ModelError, match="no such folder or file"):
        find_model("folder/nothing.gguf")


def test_without_the_package_the_demo_model_takes_its_place(monkeypatch, capsys, tmp_path, model_folder):
    monkeypatch.setattr(packaged, "packaged_file", lambda: None)
    monkeypatch.setattr("sagellm.demo_model.ensure_demo_model", lambda quiet: model_folder("llama"))
    with pytest.raises(ModelError, match="not installed; run `sagellm model get smollm2`"):
        find_model("smollm2")
    source = find_model(None)
    assert (source.kind, source.name) == ("demo", "sagellm-demo")
    assert prepare_model(source) == model_folder("llama")
    said = capsys.readouterr().err
    assert "smollm2 is not installed; the demo model" in said and said.count("\n") == 1 and packaged.GET in said


@pytest.mark.slow
def test_a_hub_id_without_a_network(monkeypatch, tmp_path):
    """In a process of its own: the hub's library reads its settings when it is imported."""
    environment = os.environ | {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "sagellm.serve", "--model", "org/name", "--device", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    said = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.returncode == 2 and done.stdout == ""
    assert said == [
        "error: org/name is not on this machine, and Hugging Face cannot be reached. Connect to the network, or give --model a "
        "local folder or a .gguf file."
    ]


def http_error(kind, status):
    response = requests.Response()
    response.status_code = status
    return kind(f"{status} Server Error:\n  for url: https://hub/", response=response)


def chained(cause):
    try:
        raise errors.LocalEntryNotFoundError("cannot find the files in the cache") from cause
    except errors.LocalEntryNotFoundError as error:
        return error


REASONS = {
    "invalid id": (errors.HFValidationError("Repo id is too long."), "is no id of Hugging Face: Repo id is too long. Give org"),
    "no connection": (requests.ConnectionError("refused"), "is not on this machine, and Hugging Face cannot be reached"),
    "time over": (chained(requests.ReadTimeout("slow")), "is not on this machine, and Hugging Face cannot be reached"),
    "hub down": (chained(http_error(errors.HfHubHTTPError, 503)), "cannot be fetched from Hugging Face: 503 Server Error: for"),
    "no model": (http_error(errors.RepositoryNotFoundError, 404), "is neither a folder here nor a model on Hugging Face"),
    "no revision": (http_error(errors.RevisionNotFoundError, 404), "Hugging Face has no such revision"),
    "gated": (http_error(errors.GatedRepoError, 403), "is a gated model"),
    "full disk": (OSError(errno.ENOSPC, "No space left on device"), "cannot be stored: No space left on device. Free"),
    "a bug": (ZeroDivisionError(), "cannot be fetched from Hugging Face: ZeroDivisionError. Try again later, or give"),
}


@pytest.mark.parametrize("name", REASONS)
def test_errors_of_a_hub_name_their_cause(monkeypatch, name):
    error, words = REASONS[name]

    def fail(*asked, **options):
        raise error

    monkeypatch.setattr("lmdeploy.utils.get_model", fail)
    done = run("get", "org/name")
    assert done.exit_code == 2 and done.stderr.startswith("error: org/name") and done.stderr.count("\n") == 1
    assert words in done.stderr and ("cannot be reached" in done.stderr) == ("cannot be reached" in words)


def test_a_hub_id_in_the_cache_needs_no_network(monkeypatch, tmp_path, model_folder):
    snapshot = tmp_path / "models--org--name" / "snapshots" / ("0" * 40)
    snapshot.parent.mkdir(parents=True)
    snapshot.symlink_to(model_folder("llama"))
    (tmp_path / "models--org--name" / "refs").mkdir()
    (tmp_path / "models--org--name" / "refs" / "main").write_text("0" * 40)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert prepare_model(find_model("org/name")) == snapshot
    with pytest.raises(ModelError, match="org/name@other is not on this machine"):
        prepare_model(find_model("org/name@other"))


@pytest.fixture
def folder(tmp_path, model_folder):
    """A copy of a good folder that a test may spoil."""
    path = tmp_path / "model"
    path.mkdir()
    for file in model_folder("llama").iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    check_folder(path)
    return path


def edit(file, **changes):
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def cut(file, size):
    file.write_bytes(file.read_bytes()[:size])


def edit_header(folder, change):
    """Change the header of the weights, and keep their data."""
    file = folder / "model.safetensors"
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])


def halve(header):
    header["model.norm.weight"]["shape"][0] //= 2


def overlap(header):
    """The second tensor lies over the first, of the same size."""
    first, second = sorted(
        (name for name in header if "k_proj" in name), key=lambda name: header[name]["data_offsets"]
    )
    header[second]["data_offsets"] = header[first]["data_offsets"]


def rename(header):
    header["other"] = header.pop("model.layers.1.mlp.up_proj.weight")


def impossible_merges(folder):
    content = json.loads((folder / "tokenizer.json").read_text())
    content["model"]["merges"] = [["nothing", "nowhere"]]
    (folder / "tokenizer.json").write_text(json.dumps(content))


SPOILED = {
    "no configuration": (lambda folder: (folder / "config.json").unlink(), "has no config.json"),
    "configuration": (lambda folder: (folder / "config.json").write_text("[1]"), "holds a list, not an object"),
    "no architecture": (lambda folder: edit(folder / "config.json", architectures=None), "names no `architectures`"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "has no weights"),
    "cut weights": (lambda folder: cut(folder / "model.safetensors", 5000), "truncated or damaged: 5000 bytes"),
    "cut header": (lambda folder: cut(folder / "model.safetensors", 50), "its header cannot be read"),
    "empty": (lambda folder: cut(folder / "model.safetensors", 0), "its header cannot be read"),
    "no tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), "has no tokenizer"),
    "tokenizer": (lambda folder: (folder / "tokenizer.json").write_text("{}"), "cannot be loaded by the tokenizers lib"),
    "merges": (impossible_merges, "tokenizer.json cannot be loaded by the tokenizers library .*nothing"),
    "cut tokenizer": (lambda folder: cut(folder / "tokenizer.json", 500), "tokenizer.json cannot be loaded"),
    "cut settings": (lambda folder: cut(folder / "tokenizer_config.json", 50), "tokenizer_config.json cannot be read: "),
    "cut generation": (lambda folder: cut(folder / "generation_config.json", 10), "generation_config.json cannot be read: "),
    "a size that is text": (lambda folder: edit(folder / "config.json", vocab_size="x"), "has vocab_size 'x'; it must be a w"),
    "a size of 0": (lambda folder: edit(folder / "config.json", hidden_size=0), "has hidden_size 0; it must be a whole"),
    "no text_config": (lambda folder: edit(folder / "config.json", text_config=5), "has text_config 5; it must be an object"),
    "halved shape": (
        lambda folder: edit_header(folder, halve), r"tensor model.norm.weight has type F32, shape \[32\] and 256 bytes"
    ),
    "turned shape": (
        lambda folder: edit_header(folder, lambda header: header["model.layers.1.mlp.up_proj.weight"]["shape"].reverse()),
        r"has tensor model.layers.1.mlp.up_proj.weight of shape \[64, 128\], its config.json asks for \[128, 64\]",
    ),
    "overlap": (lambda folder: edit_header(folder, overlap), "k_proj.weight begins at byte .* before it ends at"),
    "type": (
        lambda folder: edit_header(folder, lambda header: header["model.norm.weight"].update(dtype="F33")),
        "tensor model.norm.weight has type F33, which safetensors does not have",
    ),
    "lost tensor": (
        lambda folder: edit_header(folder, rename), "lacks 1 tensors of LlamaForCausalLM, such as model.layers.1.mlp.up_proj;"
    ),
    "small embedding": (lambda folder: edit(folder / "config.json", vocab_size=300), "tokenizer of 320 tokens and an embed"),
    "index": (
        lambda folder: (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-2.safetensors"}}'),
        "lacks 1 files of its index, such as model-2.safetensors",
    ),
}


@pytest.mark.parametrize("name", SPOILED)
def test_spoiled_folders_are_refused(folder, name):
    spoil, words = SPOILED[name]
    spoil(folder)
    with pytest.raises(ModelError, match=words) as caught:
        check_folder(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["cut settings", "merges", "halved shape"])
def test_spoiled_folders_end_commands_with_one_sentence(folder, name):
    SPOILED[name][0](folder)
    for words in (("model", "get"), ("model", "info"), ("evaluate",), ("serve", "--device", "cpu", "--model")):
        done = CliRunner().invoke(main, [*words, str(folder)])
        assert done.exit_code == 2 and done.stderr.count("\n") == 1 and SPOILED[name][1][:20] in done.stderr
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ()), "processes that are started later would inherit it"


def test_weights_are_counted(model_folder):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_folder("llama"))
    assert num_weights(model_folder("llama")) == sum(values.numel() for values in model.parameters())


def test_sampling_is_what_the_authors_of_a_model_advise(folder):
    source = find_model(folder)
    assert source.sampling(folder) == {}
    given = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": 2, "do_sample": True}
    (folder / "generation_config.json").write_text(json.dumps(given))
    assert source.sampling(folder) == {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
    spoiled = {"temperature": -1, "top_k": 0.5, "top_p": 0, "min_p": "0.1", "repetition_penalty": None}
    (folder / "generation_config.json").write_text(json.dumps(spoiled | {"top_k": -1}))
    assert source.sampling(folder) == {}
    assert find_model("smollm2").sampling(folder) == {"temperature": 0.0}


def test_get_info_list_and_remove(monkeypatch, tmp_path):
    from benchmarks.models.gguf_files import write_gguf
    from tests.models.test_gguf import random_model

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    write_gguf(tmp_path / "tiny.gguf", random_model("llama"), "llama")
    names = {row["name"]: row for row in json.loads(run("list", "--json").output)}
    assert names["smollm2"]["folder"] is None and "tiny" not in names
    made = run("get", tmp_path / "tiny.gguf")
    assert made.exit_code == 0
    names = {row["name"]: row for row in json.loads(run("list", "--json").output)}
    assert names["tiny"]["folder"] == made.output.strip()
    facts = json.loads(run("info", tmp_path / "tiny.gguf", "--json").stdout)
    assert facts["architecture"] == "LlamaForCausalLM" and facts["chat_template"] == "of the model"
    assert facts["stop_tokens"] == ["<|im_end|>"] and facts["missing_on_cpu"] == {}
    assert facts["eager_on_cpu"] == ""
    parameters = sum(values.numel() for values in random_model("llama").parameters())
    assert (facts["parameters"], facts["weight_bytes"]) == (parameters, 4 * parameters)
    assert facts["kv_bytes"] == 128 * 2 * 2 * 32 * 4, "two blocks of 64 tokens, keys and values of two layers"
    shown = run("info", tmp_path / "tiny.gguf").output
    assert "CPU device lacks" in shown and "nothing" in shown
    assert run("remove", "tiny").exit_code == 0 and run("remove", "tiny").exit_code == 2
    assert (tmp_path / "tiny.gguf").exists() and not os.path.exists(made.output.strip())


@pytest.fixture
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.utils._cache_manager.HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path


def converted(path, seed):
    """A GGUF file and the folder that it was converted to."""
    from benchmarks.models.gguf_files import write_gguf
    from tests.models.test_gguf import random_model

    path.parent.mkdir(exist_ok=True)
    write_gguf(path, random_model("llama", seed), "llama")
    return path, convert_gguf(path, path.stem)


def test_remove_takes_what_model_takes(cache, monkeypatch):
    one, made = converted(cache / "one" / "tiny.gguf", 0)
    other, kept = converted(cache / "other" / "tiny.gguf", 1)
    refused = run("remove", "tiny")
    assert refused.exit_code == 2 and "2 models in the cache have the name tiny; give the file of one: " in refused.stderr
    assert str(one) in refused.stderr and str(other) in refused.stderr and made.is_dir() and kept.is_dir()
    monkeypatch.chdir(cache / "one")
    done = run("remove", "./tiny.gguf")
    assert done.exit_code == 0 and str(made) in done.output and not made.exists() and kept.is_dir() and one.exists()
    again = run("remove", "tiny.gguf")
    assert again.exit_code == 2 and "there is no model tiny.gguf in the cache; there are: tiny." in again.stderr
    other.unlink()
    assert run("remove", other).exit_code == 0 and not kept.exists(), "the file of the record need not be there"
    one, made = converted(one, 0)
    assert run("remove", made).exit_code == 0 and not made.exists()


def test_remove_tells_the_default_model_from_a_file_of_its_name(cache, monkeypatch):
    _, made = converted(cache / "smollm2.gguf", 0)
    monkeypatch.setattr(packaged, "packaged_file", lambda: converted(cache / "package.gguf", 1)[0])
    packed = convert_gguf(packaged.packaged_file(), "smollm2")
    assert run("remove", "smollm2").exit_code == 0
    assert made.is_dir() and not packed.exists()


def test_remove_takes_a_hub_id(cache, model_folder):
    snapshot = cache / "hub" / "models--org--name" / "snapshots" / ("0" * 40)
    shutil.copytree(model_folder("llama"), snapshot)
    (cache / "hub" / "models--org--name" / "refs").mkdir()
    (cache / "hub" / "models--org--name" / "refs" / "main").write_text("0" * 40)
    refused = run("remove", "org/name@main")
    assert refused.exit_code == 2 and "org/name is removed with all its revisions; leave out @main." in refused.stderr
    assert run("remove", "org/name").exit_code == 0 and not snapshot.exists()


def test_a_removal_that_is_killed_leaves_no_half_model(cache, monkeypatch):
    file, made = converted(cache / "tiny.gguf", 0)
    remove = shutil.rmtree

    def killed(folder, **options):
        with open(made.parent / f".{made.name}.lock") as lock, pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        next(Path(folder).rglob("*.safetensors")).unlink()
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        remove_model(str(file))
    assert not made.exists()
    monkeypatch.setattr(shutil, "rmtree", remove)
    check_folder(convert_gguf(file, "tiny"))
    assert sorted(path.name for path in made.parent.iterdir()) == [f".{made.name}.lock", made.name]


def test_info_names_the_operators_that_the_cpu_device_lacks(tmp_path):
    from safetensors.torch import load_file, save_file

    from sagellm.engines.lmdeploy.contract.architectures import write_model

    write_model("DeepseekV2", tmp_path / "deepseek")
    facts = json.loads(run("info", tmp_path / "deepseek", "--json").stdout)
    assert (facts["missing_on_cpu"], facts["eager_on_cpu"]) == ({}, "the native step does not know DeepseekV2ForCausalLM")
    write_model("Mixtral", tmp_path)
    edit(tmp_path / "config.json", quantization_config={"quant_method": "fp8", "fmt": "e4m3"})
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.layers.0.block_sparse_moe.gate.weight_scale_inv"] = torch.ones(1, 1)
    save_file(weights, tmp_path / "model.safetensors")
    facts = json.loads(run("info", tmp_path, "--json").stdout)
    assert "FusedMoEBlockedF8" in facts["missing_on_cpu"]
    refused = CliRunner().invoke(main, ["serve", "--model", str(tmp_path), "--device", "cpu"])
    assert refused.exit_code == 2
    assert "MixtralForCausalLM, which the CPU device cannot run: " in refused.stderr
    assert "FusedMoEBlockedF8" in refused.stderr
    edit(tmp_path / "config.json", architectures=["MartianForCausalLM"])
    refused = CliRunner().invoke(main, ["serve", "--model", str(tmp_path), "--device", "cpu"])
    assert refused.exit_code == 2 and "MartianForCausalLM, which LMDeploy 0.11.0's PyTorch engine does not" in refused.stderr


def test_a_server_of_gpt_oss_needs_the_vocabulary_of_its_chat_format(tmp_path, monkeypatch):
    from sagellm.engines.lmdeploy.contract.architectures import write_model

    def load(name):
        raise OSError("no network.")

    write_model("GptOss", tmp_path)
    monkeypatch.setattr("openai_harmony.load_harmony_encoding", load)
    refused = CliRunner().invoke(main, ["serve", "--model", str(tmp_path), "--device", "cpu"])
    assert refused.exit_code == 2 and "needs the vocabulary of Harmony, its chat format: no network. Download" in refused.stderr


def test_errors_are_one_sentence_and_code_2():
    names = ("nothing", "x" * 400, "~nobody-of-this-name/x")
    for words in ((command, name) for command in ("info", "get", "remove") for name in names):
        done = run(*words)
        assert done.exit_code == 2 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
