"""Cost of guesses from text: telling a strategy the tokens of a step, and asking it for the next guesses."""

import time
from typing import Any

import numpy as np

from benchmarks.result import Definition

CONTEXTS = {"1k": 1 << 10, "8k": 1 << 13, "32k": 1 << 15}
NUM_ASKS = (1, 16)
LOOKAHEAD = 8
OPTIONS: dict[str, Any] = {"num_steps": 100, "twin_steps": 3, "shorten": 1}
WORK = (
    "CPU time of `accept` of 1 to 5 tokens and of `propose` of up to 8 guesses, a sequence and step, median; {asks} of "
    "{context} tokens (divided by `shorten`), half of them copied from what stood before, half Zipf's with power 1 of 30,000."
)


def _definitions() -> dict[str, Definition]:
    found = {}
    for name in ("ngram", "suffix"):
        for context in CONTEXTS:
            for asks in NUM_ASKS:
                text = f"Strategy {name}: " + WORK.format(asks=f"{asks} sequence(s)", context=context)
                found[f"speculative_{name}_us_{context}_by_{asks}"] = Definition(unit="us", better="lower", text=text)
            text = f"Strategy {name}, plain twin: " + WORK.format(asks="1 sequence", context=context)
            found[f"speculative_{name}_twin_us_{context}"] = Definition(unit="us", better="lower", text=text)
            text = f"Strategy {name}: CPU time of `begin` with {context} tokens, a token."
            found[f"speculative_{name}_begin_ns_{context}"] = Definition(unit="ns", better="lower", text=text)
            text = f"Strategy {name}: memory of the index, with its copy of the text, a token of {context}."
            found[f"speculative_{name}_bytes_{context}"] = Definition(unit="B", better="lower", text=text)
    text = "The suffix strategy's tree of ended answers, 32k tokens in answers of 512 (divided by `shorten`), a token."
    found["speculative_history_bytes"] = Definition(unit="B", better="lower", text=text)
    return found


DEFINITIONS = _definitions()


def run(seed: int, num_steps: int, twin_steps: int, shorten: int) -> dict[str, float]:
    from sagellm import _core

    rng = np.random.default_rng(seed)
    metrics: dict[str, float] = {}
    for context, full in CONTEXTS.items():
        num_tokens = full // shorten
        index = {"ngram": _core.NgramIndex(1, 4), "suffix": _core.SuffixIndex(32)}
        for name in ("ngram", "suffix"):
            for asks in NUM_ASKS:
                spent, begin = _measure(rng, name, num_tokens, asks, num_steps, False)
                metrics[f"speculative_{name}_us_{context}_by_{asks}"] = spent
            metrics[f"speculative_{name}_begin_ns_{context}"] = begin
            metrics[f"speculative_{name}_twin_us_{context}"], _ = _measure(rng, name, num_tokens, 1, twin_steps, True)
            index[name].append(_text(rng, num_tokens))
            metrics[f"speculative_{name}_bytes_{context}"] = index[name].num_bytes / num_tokens
    history = _core.SuffixHistory(32, CONTEXTS["32k"] // shorten)
    for _ in range(CONTEXTS["32k"] // 512):
        history.add(_text(rng, max(1, 512 // shorten)))
    metrics["speculative_history_bytes"] = history.num_bytes / len(history)
    return metrics


def _text(rng: np.random.Generator, num_tokens: int) -> np.ndarray:
    """int64 [num_tokens]: runs of 4 to 64 tokens, every other one a copy from before."""
    weights = 1 / np.arange(1, 30_001)
    weights = np.cumsum(weights / weights.sum())
    text = np.empty(0, np.int64)
    while len(text) < num_tokens:
        run = int(rng.integers(4, 65))
        start = int(rng.integers(0, max(1, len(text) - run)))
        new = np.minimum(np.searchsorted(weights, rng.random(run)), 29_999)
        text = np.concatenate([text, new, text[start : start + run]])
    return text[:num_tokens]


def _measure(
    rng: np.random.Generator, name: str, num_tokens: int, num_asks: int, num_steps: int, reference: bool
) -> tuple[float, float]:
    """(us a sequence and step, ns a token of `begin`); all sequences end with `num_tokens` tokens."""
    from sagellm.accel.speculative.base import Ask
    from sagellm.accel.speculative.registry import make_speculator

    strategy = make_speculator(name, lookahead=LOOKAHEAD, reference=reference)
    gains = rng.integers(1, 6, (num_asks, num_steps))
    texts = [_text(rng, num_tokens) for _ in range(num_asks)]
    sizes = num_tokens - gains.sum(1)
    begin_ns = time.thread_time_ns()
    for request, text in enumerate(texts):
        strategy.begin(request, text[: sizes[request]])
    begin_ns = time.thread_time_ns() - begin_ns
    num_begun = int(sizes.sum())
    blocks, spent = np.empty(0, np.int64), []
    for step in range(num_steps):
        new = [text[size : size + gain].tolist() for text, size, gain in zip(texts, sizes, gains[:, step], strict=True)]
        sizes = sizes + gains[:, step]
        asks = [Ask(request, text[: sizes[request]], LOOKAHEAD, blocks) for request, text in enumerate(texts)]
        start_ns = time.thread_time_ns()
        for request, tokens in enumerate(new):
            strategy.accept(request, tokens)
        strategy.propose(asks)
        spent.append((time.thread_time_ns() - start_ns) / 1e3 / num_asks)
    return float(np.median(spent)), begin_ns / num_begun
