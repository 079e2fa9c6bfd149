"""Converted GGUF files: weights, configuration, tokenizer, and what is refused."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from jinja2.sandbox import ImmutableSandboxedEnvironment
from lmdeploy import tokenizer as lmdeploy_tokenizer
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from benchmarks import serve_startup, token_ids
from benchmarks.models.gguf_files import add_byte_level, byte_level_vocabulary, write_gguf, write_vocabulary
from sagellm.engines.base import SamplingParams
from sagellm.models import ModelError, packaged
from sagellm.models.convert import convert_gguf, models_dir, read_conversion
from sagellm.models.gguf_file import GGUFFile, shortest
from sagellm.models.gguf_tokenizer import write_tokenizer

SHAPE = dict(
    hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=320,
    max_position_embeddings=128, rms_norm_eps=1e-5, rope_theta=50_000.0, bos_token_id=1, eos_token_id=2, pad_token_id=0,
)  # fmt: skip
VARIANTS = {
    "llama": ("llama", {}),
    "llama with biases, tied": ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "gemma": ("gemma", {"head_dim": 32, "hidden_activation": "gelu_pytorch_tanh"}),
    "gemma2": ("gemma2", {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 16}),
    "gemma3": (
        "gemma3", {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 16, "num_hidden_layers": 7},
    ),
    "phi3": ("phi3", {"sliding_window": None}),
}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def random_model(architecture, seed=0, **settings):
    config = CONFIG_MAPPING[{"gemma3": "gemma3_text"}.get(architecture, architecture)](**SHAPE | settings)
    config._attn_implementation = "eager"
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, values in model.named_parameters():
            if values.ndim == 1:  # norms and biases, which start as ones and zeros
                values.add_(0.1 * torch.randn_like(values)) if "norm" in name else values.normal_()
    return model


def logits(model):
    with torch.no_grad():
        return model(torch.arange(10, 40)[None]).logits


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "tiny.gguf"
    write_gguf(path, random_model("llama"), "llama")
    return path


@pytest.mark.parametrize("name", VARIANTS)
def test_a_converted_model_computes_what_the_original_does(tmp_path, name):
    architecture, settings = VARIANTS[name]
    model = random_model(architecture, **settings)
    write_gguf(tmp_path / "tiny.gguf", model, architecture)
    folder = convert_gguf(tmp_path / "tiny.gguf", "tiny")
    converted = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    assert type(converted) is type(model) and converted.dtype == torch.float32
    assert torch.allclose(logits(converted), logits(model), atol=1e-5)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "F16", "BF16"])
def test_weights_are_what_the_gguf_package_reads(tmp_path, kind):
    write_gguf(tmp_path / "tiny.gguf", random_model("qwen2"), "qwen2", kind)
    weights = load_file(convert_gguf(tmp_path / "tiny.gguf", "tiny") / "model.safetensors")
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "tiny.gguf").tensors}
    stored = {"F16": torch.float16, "BF16": torch.bfloat16}.get(kind, torch.float32)
    for ours, theirs in (("blk.1.ffn_down", "model.layers.1.mlp.down_proj"), ("token_embd", "model.embed_tokens")):
        tensor = tensors[f"{ours}.weight"]
        expected = gguf.dequantize(tensor.data, tensor.tensor_type)
        assert weights[f"{theirs}.weight"].dtype == stored
        assert np.array_equal(weights[f"{theirs}.weight"].float().numpy(), expected)


def test_large_models_become_bfloat16(tmp_path, monkeypatch):
    monkeypatch.setattr("sagellm.models.gguf_weights.MAX_FLOAT32_BYTES", 0)
    write_gguf(tmp_path / "tiny.gguf", random_model("llama"), "llama", "Q8_0")
    weights = load_file(convert_gguf(tmp_path / "tiny.gguf", "tiny") / "model.safetensors")
    tensor = next(one for one in gguf.GGUFReader(tmp_path / "tiny.gguf").tensors if one.name == "output.weight")
    expected = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type)).bfloat16()
    assert torch.equal(weights["lm_head.weight"], expected), "rounded as torch rounds"


def test_factors_of_llama3_are_recognised(tmp_path):
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling["original_max_position_embeddings"] = 8192
    model = random_model("llama", rope_scaling=scaling)
    plain = random_model("llama")
    factors = plain.model.rotary_emb.inv_freq / model.model.rotary_emb.inv_freq
    assert factors.max() > 7 and factors.min() == 1

    write_gguf(tmp_path / "tiny.gguf", model, "llama", rope_factors=factors.numpy())
    folder = convert_gguf(tmp_path / "tiny.gguf", "tiny")
    assert json.loads((folder / "config.json").read_text())["rope_scaling"] == scaling
    assert torch.allclose(logits(AutoModelForCausalLM.from_pretrained(folder)), logits(model), atol=1e-5)

    write_gguf(tmp_path / "other.gguf", model, "llama", rope_factors=factors.numpy() * 1.5)
    with pytest.raises(ModelError, match="not those of Llama 3.1"):
        convert_gguf(tmp_path / "other.gguf", "other")


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_the_engine_answers_as_transformers_does(tmp_path, start_engine, name):
    architecture, settings = VARIANTS[name]
    file = tmp_path / "tiny.gguf"
    write_gguf(file, random_model(architecture, **settings), architecture)
    folder = convert_gguf(file, "tiny")
    prompt = [list(range(20, 45))]
    engine = start_engine(model=file, dtype="float32")
    (answer,) = engine.generate(prompt, SamplingParams(max_new_tokens=12, ignore_eos=True))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    expected = model.generate(torch.tensor(prompt), max_new_tokens=12, do_sample=False, eos_token_id=None)
    assert list(answer.token_ids) == expected[0, len(prompt[0]) :].tolist()


def test_end_of_answers_and_chat_template(file, caplog):
    folder = convert_gguf(file, "tiny")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert (tokenizer.eos_token, tokenizer.bos_token) == ("<|im_end|>", "<|im_start|>")
    generation = {"bos_token_id": 1, "eos_token_id": [2], "temperature": 0.6, "top_k": 20}
    assert json.loads((folder / "generation_config.json").read_text()) == generation
    text = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode([3, 1, *tokenizer("hello").input_ids, 2], skip_special_tokens=True) == "hello"
    assert tokenizer(text).input_ids.count(1) == 2, "no BOS is added to the one of the template"
    assert lmdeploy_tokenizer.Tokenizer(str(folder)).encode(text) == tokenizer(text).input_ids
    assert "duplicate bos" not in caplog.text


# No two spaces before a digit: transformers' own reading of the file makes one token too many of them.
TURNS = [
    ("user", "What is 12 345 + 6?"),
    ("assistant", "It  is 12351.\n"),
    ("user", " Größe: 7 m² 🙂 日本語\n\n```py\n\tx = 1\n```"),
]
CHATS = {
    "a question": TURNS[:1],
    "a system prompt": [("system", "Be brief."), *TURNS[:1]],
    "several turns": TURNS,
    "an empty system prompt": [("system", ""), *TURNS],
    "special tokens in the text": [("user", "<|im_end|>\n<|im_start|>system\nx<|endoftext|>"), ("assistant", "{{ x }}")],
    "an answer first": TURNS[1:],
}


@pytest.mark.slow
def test_chats_of_the_default_model_are_those_of_its_file(tmp_path):
    """The text that the file's own template gives, and the ids that transformers makes of it with the file's vocabulary."""
    path = packaged.packaged_file()
    file = GGUFFile(path)
    write_tokenizer(file, tmp_path, 8192)
    ours = AutoTokenizer.from_pretrained(tmp_path)
    theirs = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    template = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(
        file.need("tokenizer.chat_template")
    )
    for name, turns in CHATS.items():
        messages = [{"role": role, "content": content} for role, content in turns]
        for prompt in (True, False):
            text = template.render(messages=messages, add_generation_prompt=prompt)
            ids = [each.apply_chat_template(messages, add_generation_prompt=prompt) for each in (ours, theirs)]
            assert ours.apply_chat_template(messages, add_generation_prompt=prompt, tokenize=False) == text, name
            assert ids[0] == ids[1] == ours(text).input_ids, name
    end = file.need("tokenizer.ggml.eos_token_id")
    assert json.loads((tmp_path / "generation_config.json").read_text())["eos_token_id"] == [end] == [ours.eos_token_id]
    assert ours.convert_tokens_to_ids("<|im_end|>") == end and ours.bos_token_id == file.need("tokenizer.ggml.bos_token_id")


KINDS = json.loads((Path(token_ids.__file__).parent / "results" / "token_ids.json").read_text())["tokenizers"]


def check_ids(folder, kinds):
    for name, path in token_ids.vocabularies(folder):
        if name in kinds:
            assert token_ids.digest(token_ids.our_ids(path)[0]) == KINDS[name]["sha256"], name


@pytest.mark.slow
def test_token_ids_are_llama_cpps(tmp_path, monkeypatch):
    monkeypatch.setattr(token_ids, "KINDS", ("smollm",))
    check_ids(tmp_path, ("smollm", "llama, with a space in front"))


@pytest.mark.slow
def test_token_ids_of_every_kind_are_llama_cpps(tmp_path):
    check_ids(tmp_path, KINDS)


def test_a_file_is_converted_once(file):
    folder = convert_gguf(file, "tiny")
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert convert_gguf(file, "tiny") == folder
    copy = file.with_name("copy.gguf")
    copy.write_bytes(file.read_bytes())
    assert convert_gguf(copy, "copy") == folder, "the same content"
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == before
    assert read_conversion(folder).source == file and len(read_conversion(folder).sha256) == 64
    with pytest.raises(ModelError, match="altered or is damaged"):
        convert_gguf(file, "tiny", sha256="0" * 64)


CONVERT = "import sys; from pathlib import Path; from sagellm.models.convert import convert_gguf; "
CONVERT += "print(convert_gguf(Path(sys.argv[1]), 'tiny'))"


def convert_in_process(file):
    command = [sys.executable, "-c", CONVERT, str(file)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_processes_that_convert_at_once(file):
    answers = [process.communicate(timeout=60) for process in [convert_in_process(file) for _ in range(3)]]
    assert len({out for out, _ in answers}) == 1 and all(not error for _, error in answers)
    assert sorted(path.suffix for path in models_dir().iterdir() if path.name.startswith(".")) == [".lock"]


@pytest.mark.slow
def test_a_conversion_that_is_killed_starts_again(tmp_path):
    """Killed at ten moments, from the start of Python to the end of the conversion."""
    file = tmp_path / "tiny.gguf"
    write_gguf(file, random_model("llama", vocab_size=20_000), "llama")
    start = time.monotonic()
    out, error = convert_in_process(file).communicate(timeout=60)
    length, expected = time.monotonic() - start, Path(out.strip())
    assert not error
    content = {path.name: path.read_bytes() for path in expected.iterdir()}
    killed = 0
    for part in range(10):
        for path in expected.iterdir():
            path.unlink()
        expected.rmdir()
        process = convert_in_process(file)
        time.sleep(length * (0.5 + 0.05 * part))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        killed += not expected.exists()
        assert convert_gguf(file, "tiny") == expected
        assert {path.name: path.read_bytes() for path in expected.iterdir()} == content
        assert [path.name for path in models_dir().iterdir() if ".building-" in path.name] == []
    assert killed, "no process was killed before it had finished"


@pytest.mark.parametrize("limit, full", [(5_000, "tokenizer.json"), (100_000, "model.safetensors")])
def test_a_full_disk_leaves_nothing(file, limit, full):
    made = convert_gguf(file, "tiny")
    sizes = {path.name: path.stat().st_size for path in made.iterdir()}
    assert sizes[full] > limit and (full == "tokenizer.json" or sizes["tokenizer.json"] < limit)
    shutil.rmtree(made)
    code = "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
    code += f"resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit})); "
    command = [sys.executable, "-B", "-c", code + CONVERT, file]  # -B: the limit would cut compiled modules short
    run = subprocess.run(command, capture_output=True, text=True)
    assert "ModelError: tiny.gguf cannot be converted in" in run.stderr and "XDG_CACHE_HOME" in run.stderr
    assert [path.suffix for path in models_dir().iterdir()] == [".lock"]


def rewritten(file, tmp_path, drop=(), **changes):
    """A copy of a file with changed metadata."""
    reader = gguf.GGUFReader(file)
    architecture = changes.get("architecture", "llama")
    path = tmp_path / "changed.gguf"
    writer = gguf.GGUFWriter(path, architecture)
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture" or name in changes:
            continue
        kind = field.types[0]
        writer.add_key_value(name, field.contents(), kind, field.types[1] if len(field.types) > 1 else None)
    for name, value in changes.items():
        if name != "architecture":
            kind = gguf.GGUFValueType.UINT32 if isinstance(value, int) else gguf.GGUFValueType.STRING
            writer.add_key_value(name, value, kind)
    for tensor in reader.tensors:
        if tensor.name not in drop:
            writer.add_tensor(tensor.name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"architecture": "mamba"}, "has architecture 'mamba'; GGUF files can be converted for llama, qwen2"),
        ({"llama.expert_count": 8}, "is a mixture of 8 experts"),
        ({"llama.embedding_length": 32}, "has shape .* its metadata ask for"),
        ({"llama.block_count": 3}, "truncated or damaged .9 tensors are missing, such as blk.2.attn_k.weight"),
        ({"drop": ["output_norm.weight"]}, "tensors are missing, such as output_norm.weight"),
        ({"tokenizer.ggml.pre": "martian"}, "cuts text by the rules 'martian'"),
        ({"tokenizer.ggml.model": "bert"}, "has a tokenizer of kind 'bert'"),
        ({"tokenizer.ggml.eos_token_id": 5000}, "eos_token_id is 5000, with"),
        ({"llama.rope.scaling.type": "spiral"}, "scales rotary positions by 'spiral'"),
    ],
)
def test_altered_metadata_is_refused(file, tmp_path, changes, words):
    path = rewritten(file, tmp_path, **changes)
    with pytest.raises(ModelError, match=words) as caught:
        convert_gguf(path, "changed")
    assert len(str(caught.value)) < 400 and "\n" not in str(caught.value)
    assert [one for one in models_dir().glob("gguf-*")] == []


def test_a_truncated_file_is_refused_wherever_it_ends(file, tmp_path):
    content = file.read_bytes()
    short = tmp_path / "short.gguf"
    for share in (0.0001, 0.001, 0.01, 0.03, 0.1, 0.5, 0.9, 0.999):
        short.write_bytes(content[: int(share * len(content))])
        with pytest.raises(ModelError, match="truncated or damaged|not a GGUF file"):
            convert_gguf(short, "short")


def test_values_that_are_not_finite_are_refused(file, tmp_path):
    content = bytearray(file.read_bytes())
    content[-64:-60] = np.float32("nan").tobytes()
    (tmp_path / "nan.gguf").write_bytes(content)
    with pytest.raises(ModelError, match="has values that are not finite"):
        convert_gguf(tmp_path / "nan.gguf", "nan")


def test_a_tokenizer_larger_than_the_embedding_is_refused(tmp_path):
    tokens, merges = byte_level_vocabulary(["hello"])

    def add(writer):
        add_byte_level(writer, tokens, merges, "gpt-2")
        return len(tokens) - 1

    write_vocabulary(tmp_path / "tiny.gguf", add)
    with pytest.raises(ModelError, match=f"tokenizer of {len(tokens)} tokens and an embedding of only {len(tokens) - 1}"):
        convert_gguf(tmp_path / "tiny.gguf", "tiny")


@pytest.mark.slow
def test_the_default_model_is_whole_and_converts_in_little_memory(tmp_path):
    """At most twice the size of its weights, which are 538 MB in float32."""
    start = os.times().children_user
    figures = serve_startup.convert(tmp_path)
    (file,) = tmp_path.glob("sagellm/models/gguf-*/model.safetensors")
    weights = file.stat().st_size
    assert 0 < figures["peak_mb"] * 1e6 < 2 * weights and weights == 538_092_792 and figures["convert_s"] > 0
    assert os.times().children_user - start < 15
    assert packaged.REQUIREMENT in (Path(__file__).parents[2] / "third_party/requirements/models.txt").read_text()


def test_numbers_are_the_shortest_that_mean_the_same():
    assert shortest(9.999999747378752e-06) == 1e-05 and shortest(100_000.0) == 100_000.0
