"""Prompts of known lengths in tokens, for the demo model: words that are one token each, whatever stands beside."""

import random
import re
from collections.abc import Sequence
from functools import lru_cache

from benchmarks.pd.client import Request


@lru_cache
def _words() -> list[str]:
    from transformers import AutoTokenizer

    from sagellm.demo_model import ensure_demo_model

    tokenizer = AutoTokenizer.from_pretrained(ensure_demo_model())
    return sorted(name[1:] for name in tokenizer.get_vocab() if re.fullmatch("Ġ[A-Za-z]{3,}", name))


def prompt(num_tokens: int, source: random.Random) -> str:
    return "".join(f" {source.choice(_words())}" for _ in range(num_tokens))


def mixed_requests(
    count: int, seed: int, lengths: Sequence[int] = (8, 1500), outputs: Sequence[int] = (8, 48), shared: float = 0.4
) -> list[Request]:
    """Lengths even in their logarithm; a share `shared` of the prompts begins as one of eight others do."""
    source = random.Random(seed)
    prefixes = [prompt(source.choice((64, 128, 256, 512)), source) for _ in range(8)]
    requests = []
    for _ in range(count):
        length = round(lengths[0] * (lengths[1] / lengths[0]) ** source.random())
        head = source.choice(prefixes) if source.random() < shared else ""
        tail = max(lengths[0], length - len(head.split()))
        requests.append(Request(head + prompt(tail, source), source.randint(*outputs)))
    return requests
