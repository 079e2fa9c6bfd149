"""Random folders load in transformers and give answers that are worth comparing."""

from pathlib import Path

import pytest

from sagellm.core.errors import ConfigError
from sagellm.demo_model import write_random_model

SHAPE = dict(hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2, intermediate_size=128, vocab_size=512)

VARIANTS = [
    {},
    {"tie_embeddings": True},
    {"head_dim": 32},
    {"architecture": "qwen2"},
    {"architecture": "qwen2", "tie_embeddings": True, "sliding_window": 16},
]


def greedy(folder: Path, text: str, count: int):
    """(new ids, smallest gap between the best two logits)."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    ids = AutoTokenizer.from_pretrained(folder).encode(text, return_tensors="pt")
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False)
    with torch.no_grad():
        best = model(out).logits[0, ids.shape[1] - 1 : -1].topk(2).values
    return out[0, ids.shape[1] :].tolist(), (best[:, 0] - best[:, 1]).min().item()


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_greedy_answers_are_varied_and_not_decided_by_rounding(tmp_path: Path, variant: dict):
    folder = write_random_model(tmp_path / "m", **SHAPE, **variant)
    first, gap = greedy(folder, "hello there", 24)
    second, _ = greedy(folder, "another prompt", 24)
    assert len(first) == 24  # no special token ends it early
    assert len(set(first)) > 8 and first != second
    assert gap > 1e-4


def test_a_large_vocabulary_loads_without_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    from transformers import AutoTokenizer
    from transformers.utils import logging

    folder = write_random_model(tmp_path, **{**SHAPE, "vocab_size": 100_100, "hidden_size": 8})
    logging.enable_propagation()
    try:
        assert len(AutoTokenizer.from_pretrained(folder)) == 100_100
    finally:
        logging.disable_propagation()
    assert caplog.messages == []


def test_every_id_has_a_text(tmp_path: Path):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(write_random_model(tmp_path, **SHAPE))
    assert len(tokenizer) == 512
    assert tokenizer.decode([300, 511]) == " w300 w511"
    assert tokenizer.decode(tokenizer.encode("é w300\n")) == "é w300\n"


def test_seed_decides_the_weights(tmp_path: Path):
    weights = [
        (write_random_model(tmp_path / str(i), **SHAPE, seed=seed) / "model.safetensors").read_bytes()
        for i, seed in enumerate([0, 0, 1])
    ]
    assert weights[0] == weights[1] != weights[2]


def test_bfloat16_and_config(tmp_path: Path):
    import torch
    from transformers import AutoModelForCausalLM

    shape = {**SHAPE, "architecture": "qwen2", "dtype": "bfloat16", "sliding_window": 8}
    model = AutoModelForCausalLM.from_pretrained(write_random_model(tmp_path, **shape), dtype="auto")
    assert model.dtype == torch.bfloat16
    assert (model.config.use_sliding_window, model.config.sliding_window) == (True, 8)
    assert set(model.config.layer_types) == {"sliding_attention"}


def test_tokenizer_of_another_folder(tmp_path: Path, tiny_folder: Path):
    from transformers import AutoTokenizer

    folder = write_random_model(tmp_path, **SHAPE, tokenizer_from=tiny_folder)
    assert AutoTokenizer.from_pretrained(folder).get_vocab() == AutoTokenizer.from_pretrained(tiny_folder).get_vocab()
    with pytest.raises(ConfigError, match=r"vocab_size is 300, but the tokenizer of .* has 400 tokens"):
        write_random_model(tmp_path, **{**SHAPE, "vocab_size": 300}, tokenizer_from=tiny_folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architecture": "gpt2"}, "architecture is 'gpt2'; allowed are llama, qwen2"),
        ({"dtype": "int8"}, "dtype is 'int8'; allowed are float32"),
        ({"num_layers": 0}, "num_layers is 0; it must be 1 or more"),
        ({"num_heads": 0}, "num_heads is 0; it must be 1 or more"),
        ({"num_kv_heads": 3}, "num_heads must be a multiple of num_kv_heads"),
        ({"head_dim": 15}, "head_dim is 15; rotary positions need an even number"),
        ({"vocab_size": 261}, "vocab_size is 261; at least 262"),
        ({"sliding_window": 8}, "only architecture 'qwen2' has one"),
        ({"sliding_window": 0, "architecture": "qwen2"}, "sliding_window is 0"),
        ({"tokenizer_from": "/nowhere"}, "has no tokenizer.json"),
    ],
)
def test_shapes_that_cannot_work(tmp_path: Path, change: dict, message: str):
    with pytest.raises(ConfigError, match=message):
        write_random_model(tmp_path / "m", **{**SHAPE, **change})
    assert not (tmp_path / "m").exists()
