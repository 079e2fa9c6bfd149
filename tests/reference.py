"""Outside oracles: greedy decoding by the models of transformers."""

from collections.abc import Callable, Sequence
from pathlib import Path

Reference = Callable[..., list[tuple[int, ...]]]


def make_prompts(lengths: Sequence[int], seed: int = 1) -> list[list[int]]:
    """Random token sequences without special tokens."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(10, 250, (length,), generator=generator).tolist() for length in lengths]


def greedy_reference(model_folder: Callable[[str], Path]) -> Reference:
    import torch
    from transformers import AutoModelForCausalLM

    models, answers = {}, {}

    @torch.inference_mode()
    def greedy(model, prompt: tuple[int, ...], num_new: int) -> list[int]:
        """`generate` gives the same tokens, and takes three times as long around the model."""
        tokens: list[int] = []
        given, cache = torch.tensor([prompt]), None
        while len(tokens) < num_new:
            out = model(given, past_key_values=cache, use_cache=True)
            given, cache = out.logits[:, -1].argmax(-1, keepdim=True), out.past_key_values
            tokens.append(int(given))
        return tokens

    def one(name: str, prompt: tuple[int, ...], num_new: int) -> tuple[int, ...]:
        known = answers.get((name, prompt), ())
        if len(known) < num_new:
            if name not in models:
                models[name] = AutoModelForCausalLM.from_pretrained(model_folder(name), dtype=torch.float32).eval()
            known = answers[name, prompt] = tuple(greedy(models[name], prompt, num_new))
        return known[:num_new]

    def reference(prompts, num_new: int, model: str = "llama") -> list[tuple[int, ...]]:
        return [one(model, tuple(prompt), num_new) for prompt in prompts]

    return reference


def write_mistral(path: Path, shape: dict[str, int], window: int) -> None:
    """A random Mistral folder; its attention has a sliding window in every layer."""
    from transformers import MistralConfig

    config = MistralConfig(
        hidden_size=shape["hidden_size"], intermediate_size=shape["intermediate_size"], vocab_size=shape["vocab_size"],
        num_hidden_layers=shape["num_layers"], num_attention_heads=shape["num_heads"],
        num_key_value_heads=shape["num_kv_heads"], max_position_embeddings=2048, sliding_window=window,
        initializer_range=0.3, bos_token_id=None, eos_token_id=None, pad_token_id=None, dtype="float32",
    )  # fmt: skip
    save_random(config, path)


def save_random(config, path: Path):
    """Write a random float32 model of a transformers configuration, with a tokenizer of bytes. Returns the model."""
    import torch
    from transformers import AutoModelForCausalLM

    from sagellm.demo_model.tokenizer import byte_tokenizer

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.save_pretrained(path)
    byte_tokenizer(config.vocab_size, 2048).save_pretrained(path, save_jinja_files=False)
    return model
