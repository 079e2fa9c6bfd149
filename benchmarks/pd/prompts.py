"""Prompts of known lengths in tokens: words of one token each for the demo model, pieces of English for others."""

import random
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from benchmarks.models.real_text import RealText, model_folder
from benchmarks.pd.client import Request

DEMO = "demo"


@lru_cache
def _english(model: str) -> tuple[RealText, Any]:
    from transformers import AutoTokenizer

    folder = model_folder(model)
    return RealText(folder), AutoTokenizer.from_pretrained(folder)


@lru_cache
def _words() -> list[str]:
    from transformers import AutoTokenizer

    from sagellm.demo_model import ensure_demo_model

    tokenizer = AutoTokenizer.from_pretrained(ensure_demo_model())
    return sorted(name[1:] for name in tokenizer.get_vocab() if re.fullmatch("Ġ[A-Za-z]{3,}", name))


def prompt(num_tokens: int, source: random.Random, model: str = DEMO) -> str:
    """Return a text of that many tokens; English may have a few more or less at its ends."""
    if model == DEMO:
        return "".join(f" {source.choice(_words())}" for _ in range(num_tokens))
    text, tokenizer = _english(model)
    return tokenizer.decode(text.prose(num_tokens, source.randrange(2**31)))


def mixed_requests(
    count: int, seed: int, lengths: Sequence[int] = (8, 1500), outputs: Sequence[int] = (8, 48), shared: float = 0.4,
    model: str = DEMO,
) -> list[Request]:  # fmt: skip
    """Lengths even in their logarithm; a share `shared` of the prompts begins as one of eight others do."""
    source = random.Random(seed)
    prefixes = [(size, prompt(size, source, model)) for size in source.choices((64, 128, 256, 512), k=8)]
    requests = []
    for _ in range(count):
        length = round(lengths[0] * (lengths[1] / lengths[0]) ** source.random())
        size, head = source.choice(prefixes) if source.random() < shared else (0, "")
        tail = max(lengths[0], length - size)
        requests.append(Request(head + prompt(tail, source, model), source.randint(*outputs), model=model))
    return requests
