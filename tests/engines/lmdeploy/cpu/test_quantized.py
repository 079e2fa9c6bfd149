"""Quantized linear layers on the CPU device: LMDeploy's modules, loaded from checkpoints, against plain PyTorch."""

import itertools
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from sagellm.accel.quantization import Calibration, make_quantizer
from sagellm.core.errors import SageError
from sagellm.demo_model.random_model import write_random_model
from sagellm.engines.base import SamplingParams
from sagellm.engines.lmdeploy.architecture import cpu_support
from sagellm.engines.lmdeploy.engine import prepare_weights
from sagellm.models.quantized import PARTS, pack_gptq, plain_weight, quantization_of, unpack_gptq
from tests.engines.lmdeploy.guesses import tokens_of
from tests.engines.lmdeploy.pd.pair import NEW, Pair
from tests.sweeps import slow_but

SHAPE = dict(num_layers=2, num_heads=4, num_kv_heads=2, vocab_size=512, dtype="float32", max_position_embeddings=256)
WHOLE = dict(hidden_size=256, intermediate_size=384, head_dim=64) | SHAPE  # sizes of whole blocks of 128
PARTIAL = dict(hidden_size=192, intermediate_size=320, head_dim=32) | SHAPE
TEXT = Calibration.default(4, 64)
METHODS = {
    "awq": ("awq", {"group_size": 32}), "gptq": ("gptq", {"group_size": 64}), "gptq 8": ("gptq", {"bits": 8, "group_size": 32}),
    "fp8": ("fp8", {}), "fp8 rows": ("fp8", {"per_channel": True}), "int8": ("int8", {}), "smooth": ("smoothquant", {}),
}  # fmt: skip
ROUNDING = 4e-3  # of logits: scales, and offsets of zero points, have half precision
PROMPTS = [list(range(3, 40)), [7, 8, 9], list(range(100, 180))]


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory):
    """`quantized(method, shape, **options)`: folder, made once."""
    root = tmp_path_factory.mktemp("quantized")

    def make(method: str, architecture: str = "llama", is_whole: bool = True, **more) -> Path:
        name, options = METHODS[method]
        place = root / f"{architecture}-{is_whole}"
        if not place.exists():
            write_random_model(place, architecture=architecture, **(WHOLE if is_whole else PARTIAL))
        out = root / "-".join([place.name, method.replace(" ", ""), *map(str, more.values())])
        if not out.exists():
            make_quantizer(name, **options | {"head_bits": 16} | more).quantize(place, TEXT, out)
        return out

    return make


def plain_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All weights of a quantized folder in float32, by the formulas of their method."""
    found = quantization_of(json.loads((folder / "config.json").read_text()))
    tensors = load_file(folder / "model.safetensors")
    first = PARTS[found.method][-1]
    for name in [name.removesuffix(f".{first}") for name in tensors if name.endswith(f".{first}")]:
        layer = {part: tensors.pop(f"{name}.{part}") for part in (*PARTS[found.method], "g_idx") if f"{name}.{part}" in tensors}
        tensors[f"{name}.weight"] = plain_weight(found, layer)
    return {name: tensor.float().contiguous() for name, tensor in tensors.items()}


def plain_model(folder: Path, place: Path) -> torch.nn.Module:
    """The model that a quantized folder stands for, in transformers."""
    place.mkdir()
    config = json.loads((folder / "config.json").read_text())
    config.pop("quantization_config")
    (place / "config.json").write_text(json.dumps(config))
    save_file(plain_tensors(folder), place / "model.safetensors", metadata={"format": "pt"})
    return AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32).eval()


def largest_difference(engine, model: torch.nn.Module) -> float:
    """Return the largest difference of logits, over the largest logit of the prompt."""
    worst = 0.0
    for prompt in PROMPTS:
        with torch.inference_mode():
            expected = model(torch.tensor([prompt])).logits[0]
        found = torch.from_numpy(engine.prompt_logits(prompt))
        worst = max(worst, float((found - expected).abs().max() / expected.abs().max()))
    return worst


def is_native(engine) -> bool:
    return engine.engine.executor.model_agent.patched_model.native is not None


@pytest.mark.parametrize(
    ("method", "is_whole"),
    slow_but(itertools.product(METHODS, (True, False)), *zip(METHODS, itertools.cycle((True, False)), strict=False)),
)
def test_answers_are_those_of_the_plain_weights(start_engine, quantized, tmp_path, method, is_whole):
    folder = quantized(method, "llama" if is_whole else "qwen2", is_whole)
    assert cpu_support(folder, "float32").eager == ""
    engine = start_engine(model=folder, dtype="float32")
    model = plain_model(folder, tmp_path / "plain")
    assert is_native(engine) and largest_difference(engine, model) < ROUNDING
    greedy = SamplingParams(max_new_tokens=12, ignore_eos=True)
    answers = engine.generate(PROMPTS, greedy)
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *answer.token_ids]])).logits[0, len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(answer.token_ids)[:, None])[:, 0]
        assert (logits.amax(1) - chosen < ROUNDING * logits.abs().max()).all()


@pytest.mark.parametrize(
    ("method", "head_bits"), slow_but([("awq", 8), ("gptq 8", 16), ("int8", 8), ("fp8", 8)], ("awq", 8))
)
def test_bfloat16_with_inputs_in_8_bits_stays_near(start_engine, quantized, tmp_path, method, head_bits):
    folder = quantized(method, head_bits=head_bits)
    model = plain_model(folder, tmp_path / "plain")
    assert largest_difference(start_engine(model=folder, dtype="bfloat16"), model) < 0.08
    engine = start_engine(model=folder, dtype="bfloat16", prefix_caching=False)
    alone = [engine.generate([prompt], GREEDY)[0].token_ids for prompt in PROMPTS]
    assert alone == [answer.token_ids for answer in engine.generate(PROMPTS, GREEDY)], "an answer depends on the batch"


GREEDY = SamplingParams(max_new_tokens=NEW, ignore_eos=True)


def reorder(folder: Path, place: Path, seed: int, differing: bool = False) -> Path:
    """A GPTQ folder of 8 bits whose inputs have an activation order."""
    shutil.copytree(folder, place)
    tensors = load_file(place / "model.safetensors")
    for name in [name for name in tensors if name.endswith(".g_idx")]:
        layer, words = name.removesuffix(".g_idx"), tensors[name.replace("g_idx", "qweight")]
        is_other = differing and layer.endswith("k_proj")
        order = torch.randperm(len(tensors[name]), generator=torch.Generator().manual_seed(seed + is_other))
        levels = unpack_gptq(words, 8, 0)
        shuffled, groups = torch.empty_like(levels), torch.empty_like(tensors[name])
        shuffled[order], groups[order] = levels, tensors[name]
        tensors[name.replace("g_idx", "qweight")], tensors[name] = pack_gptq(shuffled, 8, 0), groups
    save_file(tensors, place / "model.safetensors")
    config = json.loads((place / "config.json").read_text())
    config["quantization_config"]["desc_act"] = True
    (place / "config.json").write_text(json.dumps(config))
    return place


def test_activation_order(start_engine, quantized, tmp_path):
    folder = reorder(quantized("gptq 8"), tmp_path / "ordered", 0)
    model = plain_model(folder, tmp_path / "plain")
    assert largest_difference(start_engine(model=folder, dtype="float32"), model) < ROUNDING
    assert largest_difference(start_engine(model=folder, dtype="bfloat16"), model) < 0.08
    with pytest.raises(SageError, match="parts of model.layers.0.self_attn.qkv_proj have different orders of activation"):
        start_engine(model=reorder(quantized("gptq 8"), tmp_path / "differing", 0, differing=True))


def spoiled(folder: Path, place: Path, change) -> Path:
    shutil.copytree(folder, place)
    tensors = load_file(place / "model.safetensors")
    change(tensors)
    save_file(tensors, place / "model.safetensors")
    return place


@pytest.mark.parametrize("fault", ["scale", "zero", "groups"])
def test_planted_fault_is_found(start_engine, quantized, tmp_path, fault):
    """The comparison above fails for one wrong scale, zero point or order of groups."""
    folder, layer = quantized("awq"), "model.layers.0.mlp.down_proj"

    def change(tensors):
        if fault == "scale":
            tensors[f"{layer}.scales"][0] *= 1.5
        elif fault == "zero":
            tensors[f"{layer}.qzeros"] ^= 1
        else:
            tensors[f"{layer}.scales"] = tensors[f"{layer}.scales"].flip(0).contiguous()

    engine = start_engine(model=spoiled(folder, tmp_path / "spoiled", change), dtype="float32")
    assert largest_difference(engine, plain_model(folder, tmp_path / "plain")) > ROUNDING


@pytest.mark.parametrize("method", ["awq", "int8", "fp8"])
def test_two_ranks_answer_as_one(start_engine, quantized, method):
    folder = quantized(method)
    one = start_engine(model=folder, dtype="float32").generate(PROMPTS, GREEDY)
    two = start_engine(model=folder, dtype="float32", tensor_parallel=2).generate(PROMPTS, GREEDY)
    assert [answer.token_ids for answer in one] == [answer.token_ids for answer in two]


def test_guesses_change_no_answer_of_a_quantized_model(start_engine, quantized):
    prompts = [prompt * 2 for prompt in PROMPTS[:2]]
    params = SamplingParams(max_new_tokens=24, ignore_eos=True)
    plain = start_engine(model=quantized("awq"), dtype="bfloat16").generate(prompts, params)
    for strategy in ("ngram", "suffix"):
        engine = start_engine(model=quantized("awq"), dtype="bfloat16", speculative=strategy)
        assert [one.token_ids for one in engine.generate(prompts, params)] == [one.token_ids for one in plain]


def together(engine) -> list[tuple[int, ...]]:
    return [one.token_ids for one in engine.generate([prompt * 2 for prompt in PROMPTS], GREEDY)]


@pytest.mark.parametrize(
    ("method", "schema"), slow_but([("awq", "int8"), ("int8", "int4"), ("fp8", "fp8")], ("awq", "int8"))
)
def test_quantized_weights_with_quantized_keys_and_values(start_engine, quantized, tmp_path, method, schema):
    """With guesses, a quantized draft model, two ranks, and prompts of another engine the answers are the same."""
    settings = dict(model=quantized(method), dtype="float32", kv_schema=schema, kv_blocks=128)
    expected = together(start_engine(**settings))
    assert together(start_engine(**settings, tensor_parallel=2)) == expected
    draft = {"model": str(quantized("int8"))}
    for name, options in (("ngram", {}), ("suffix", {}), ("draft", draft)):
        engine = start_engine(**settings, speculative=name, speculative_options=options)
        assert together(engine) == expected, name
    pair = Pair(start_engine, tmp_path, **settings)
    assert tokens_of(pair.ask([prompt * 2 for prompt in PROMPTS])) == expected
    assert pair.report()["arrivals"]["done"] == len(PROMPTS)


def test_the_engine_quantizes_by_itself(start_engine, quantized, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    source = Path(json.loads((quantized("int8") / "quantization_profile.json").read_text())["source"])
    options = dict(model=source, dtype="float32", quantization="int8", quantization_options={"head_bits": 16})
    engine = start_engine(**options)
    assert engine.info.quantization.method == "int8"
    expected = start_engine(model=quantized("int8"), dtype="float32").generate(PROMPTS, GREEDY)
    assert [one.token_ids for one in engine.generate(PROMPTS, GREEDY)] == [one.token_ids for one in expected]
    (folder,) = (tmp_path / "sagellm" / "models").glob("int8-*")
    before = folder.stat().st_mtime_ns
    start_engine(**options)
    assert folder.stat().st_mtime_ns == before, "quantized again"


@pytest.mark.parametrize(
    ("settings", "words"),
    [({"quantization": "nf4"}, "unknown quantization method"), ({"quantization_options": {"bits": 4}}, "name a method"),
     ({"quantization": "int8", "weights": "packed"}, "leave out weights, or quantization"),
     ({"quantization": "int8", "engine": "turbomind"}, "PyTorch engine")],
)  # fmt: skip
def test_settings_that_contradict_each_other(model_folder, settings, words):
    from sagellm.core.config import SageConfig

    with pytest.raises(SageError, match=words):
        prepare_weights(SageConfig(**settings), model_folder("llama"))
