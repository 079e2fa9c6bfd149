"""Train the Llama-shaped model on the CPU: a fixed number of steps over packed windows of the corpus."""

import math
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sagellm.demo_model.base import DemoRecipe, TrainResult
from sagellm.demo_model.corpus import Corpus
from sagellm.demo_model.tokenizer import train_tokenizer

if TYPE_CHECKING:
    import torch
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

MAX_THREADS = 4  # the matrices are small: more threads wait for each other

Tick = Callable[[int, float], None]  # (steps done, loss of the last step)


def train_and_save(recipe: DemoRecipe, corpus: Corpus, folder: Path, tick: Tick) -> TrainResult:
    """Train tokenizer and model on `corpus` and write a Hugging Face folder.

    The weights are float32, so that serving in float32 reproduces them exactly.
    """
    texts = [text for chat in corpus.chats for text in chat] + list(corpus.plain)
    tokenizer = train_tokenizer(texts, recipe.vocab_size, recipe.max_position_embeddings)
    windows = pack_windows(recipe, tokenizer, corpus)
    with _own_torch_state(recipe.seed):
        model = new_model(recipe, tokenizer)
        loss = _train(recipe, model, windows, tick)
        model.save_pretrained(folder)
    # The template inside tokenizer_config.json, not in a file of its own: older readers look only there.
    tokenizer.save_pretrained(folder, save_jinja_files=False)
    return TrainResult(sum(p.numel() for p in model.parameters()), loss)


def pack_windows(recipe: DemoRecipe, tokenizer: "PreTrainedTokenizerFast", corpus: Corpus) -> "torch.Tensor":
    """All training tokens: int64 [steps, batch_size, window_tokens + 1].

    Documents are shuffled anew for each pass and laid end to end; every one of them ends with the end token.
    """
    import torch

    chats = [
        [{"role": "user", "content": chat.user}, {"role": "assistant", "content": chat.assistant}]
        for chat in corpus.chats
    ]
    texts = [tokenizer.apply_chat_template(chat, tokenize=False) for chat in chats]
    texts += [text + tokenizer.eos_token for text in corpus.plain]
    documents = tokenizer(texts, add_special_tokens=False)["input_ids"]
    wanted = recipe.steps * recipe.batch_size * (recipe.window_tokens + 1)
    stream: list[int] = []
    rng = random.Random(recipe.seed)
    while len(stream) < wanted:
        rng.shuffle(documents)
        for document in documents:
            stream += document
    return torch.tensor(stream[:wanted]).view(recipe.steps, recipe.batch_size, recipe.window_tokens + 1)


def new_model(recipe: DemoRecipe, tokenizer: "PreTrainedTokenizerFast") -> "LlamaForCausalLM":
    """A freshly initialised model of the recipe's shape, from torch's current random state."""
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    ids = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    config = LlamaConfig(
        vocab_size=recipe.vocab_size,
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size,
        num_hidden_layers=recipe.num_layers,
        num_attention_heads=recipe.num_heads,
        num_key_value_heads=recipe.num_kv_heads,
        head_dim=recipe.hidden_size // recipe.num_heads,
        max_position_embeddings=recipe.max_position_embeddings,
        tie_word_embeddings=True,
        dtype="float32",
        use_cache=True,
        **ids,
    )
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(**ids)
    return model


def _train(recipe: DemoRecipe, model: "LlamaForCausalLM", windows: "torch.Tensor", tick: Tick) -> float:
    """Run every step; returns the mean loss of the last tenth of them."""
    import torch

    optimizers = _optimizers(recipe, model)
    schedulers = [
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _lr_factor(step, recipe.steps))
        for optimizer in optimizers
    ]
    losses: list[float] = []
    model.train()
    for step, batch in enumerate(windows):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=_bf16_is_fast()):
            logits = model(input_ids=batch[:, :-1], use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        losses.append(loss.item())
        tick(step + 1, losses[-1])
    model.eval()
    last = losses[-max(1, len(losses) // 10) :]
    return math.fsum(last) / len(last)


def _optimizers(recipe: DemoRecipe, model: "LlamaForCausalLM") -> list[Any]:
    """Muon for the layers' matrices, which gets further than AdamW in so few steps; AdamW for the rest."""
    import torch

    from sagellm.demo_model.muon import Muon

    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    muon = torch.optim.Muon if _bf16_is_fast() else Muon
    return [
        muon(matrices, lr=recipe.muon_lr, momentum=0.95, weight_decay=0.01),
        torch.optim.AdamW(others, lr=recipe.adamw_lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    ]


def _lr_factor(step: int, steps: int) -> float:
    """A short warm-up, then a straight line to nearly zero."""
    warmup = max(1, steps // 20)
    return min((step + 1) / warmup, max(0.02, (steps - step) / max(1, steps - warmup)))


def _bf16_is_fast() -> bool:
    """Whether this processor multiplies bfloat16 matrices in hardware; emulated it is slower than float32."""
    import torch

    probe = getattr(torch.cpu, "_is_amx_tile_supported", None)  # private, so it may go away
    return bool(probe and probe())


@contextmanager
def _own_torch_state(seed: int) -> Iterator[None]:
    """Seed torch and fix its threads for the block; the caller's random state and threads come back afterwards."""
    import torch

    threads = torch.get_num_threads()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        torch.set_num_threads(min(MAX_THREADS, len(os.sched_getaffinity(0))))
        try:
            yield
        finally:
            torch.set_num_threads(threads)
