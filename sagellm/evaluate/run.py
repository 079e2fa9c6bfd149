"""Evaluates models on the same texts, piece by piece, so that no distribution has to be kept."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

import numpy as np

from sagellm.core.config import SageConfig
from sagellm.core.errors import ConfigError
from sagellm.evaluate.models import CHUNK, EngineModel, ScoredModel, TransformersModel
from sagellm.evaluate.report import ModelQuality, QualityReport, TextInfo
from sagellm.models.texts import chunks, fixed_texts, prompts

__all__ = ["Options", "beside_original", "divergence", "evaluate"]

ONE_OF = 4  # of so many prompts one is answered with a seed too
LIBRARIES = ("lmdeploy", "torch", "transformers", "sagellm")


@dataclass(frozen=True)
class Options:
    """Size of an evaluation.

    Attributes:
        tokens: tokens that are scored, half of them prose, half of them code; rounded down to whole pieces.
        chunk: tokens of a piece, at most 512.
        answers: greedy answers, and `answer_tokens` of each.
        generated: whether the reference generates its answers too. Otherwise it checks those of the others: each token must
            be its own choice after the tokens before it, which is the same up to the first difference and much faster.
    """

    tokens: int = 52_000
    chunk: int = CHUNK
    answers: int = 200
    answer_tokens: int = 64
    generated: bool = False
    seed: int = 0


@dataclass
class _Sums:
    """Sums of one model so far."""

    loss: dict[str, float] = field(default_factory=dict)
    kl: list[np.ndarray] = field(default_factory=list)
    same_top: int = 0
    positions: int = 0
    seconds: float = 0.0


def evaluate(
    title: str, folder: Path, models: Sequence[ScoredModel], options: Options | None = None,
    tick: Callable[[str], None] = lambda text: None,
) -> QualityReport:
    """Compare models with the first of them.

    Args:
        title: name of the model in the report.
        folder: whose tokenizer is used; all models must have its tokens.
        models: loaded models with different names; the first one is the reference.
        tick: called with what is being done, before each piece and each set of answers.

    Raises:
        ConfigError: options that cannot work, or models with different vocabularies.
    """
    options = options or Options()
    if not 2 <= options.chunk <= CHUNK:
        raise ConfigError(f"chunk is {options.chunk}; allowed are 2 to {CHUNK} tokens.")
    if len({model.name for model in models}) < len(models):
        raise ConfigError(f"two models have the same name: {', '.join(model.name for model in models)}.")
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    with_special = tokenizer("a").input_ids
    begin = tokenizer.bos_token_id if with_special[:1] == [tokenizer.bos_token_id] else None
    texts = fixed_texts()
    parts = {}
    for name, text in (("prose", texts.prose), ("code", texts.code)):
        tokens = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
        parts[name] = tokens[: max(options.chunk, options.tokens // 2)]
    sums = {model.name: _Sums() for model in models}
    counts = {}
    for name, tokens in parts.items():
        pieces = chunks(tokens, options.chunk, begin)
        counts[name] = len(pieces) * (options.chunk - 1)
        for number, piece in enumerate(pieces):
            tick(f"{name} {number + 1}/{len(pieces)}")
            _score(models, piece, name, sums)
    asked = _prompts(parts, begin, options)
    same, parted = _answers(models, asked, options, tick)
    in_batch = {model.name: _same_in_batch(model, asked[::ONE_OF], options, tick) for model in models}
    info = TextInfo(python=texts.python, sha256=texts.sha256, tokens=counts, chunk=options.chunk)
    return QualityReport(
        model=title, reference=models[0].name, text=info, answers=(options.answers, options.answer_tokens),
        models=[_quality(model.name, sums[model.name], counts, same, parted, in_batch[model.name]) for model in models],
        versions={name: metadata.version(name) for name in LIBRARIES}
        | {model.name: version for model in models if (version := getattr(model, "version", ""))},
    )  # fmt: skip


def beside_original(name: str, settings: SageConfig, source: Path, options: Options) -> QualityReport:
    """Evaluate a model in this engine beside the original in transformers in float32.

    Args:
        name: of the model in the report.
        source: folder of the original.

    Raises:
        SageError: one of them cannot be loaded.
    """
    with TransformersModel("float32", source, "float32") as reference, EngineModel(name, settings) as model:
        return evaluate(source.name, source, [reference, model], options)


def divergence(reference: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Return the Kullback-Leibler divergence of each row of log-probabilities from the reference's, in nats.

    Args:
        reference, other: [positions, vocabulary], float32.
    """
    return np.maximum((np.exp(reference) * (reference - other)).sum(axis=1, dtype=np.float64), 0.0)


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True, dtype=np.float64)).astype(np.float32)


def _score(models: Sequence[ScoredModel], piece: list[int], name: str, sums: dict[str, _Sums]) -> None:
    targets = np.array(piece[1:])
    rows = np.arange(len(targets))
    reference = None
    for model in models:
        start = time.perf_counter()
        logits = model.logits(piece)[:-1]
        found = sums[model.name]
        found.seconds += time.perf_counter() - start
        if reference is not None and logits.shape != reference.shape:
            raise ConfigError(
                f"{model.name} has a vocabulary of {logits.shape[1]} tokens, {models[0].name} one of {reference.shape[1]}; "
                "only models with the same tokens can be compared."
            )
        scores = _log_softmax(logits)
        reference = scores if reference is None else reference
        found.loss[name] = found.loss.get(name, 0.0) - float(scores[rows, targets].sum(dtype=np.float64))
        found.kl.append(divergence(reference, scores))
        found.same_top += int((scores.argmax(axis=1) == reference.argmax(axis=1)).sum())
        found.positions += len(targets)


def _prompts(parts: dict[str, list[int]], begin: int | None, options: Options) -> list[list[int]]:
    """Return the prompts of the answers, half of them prose, half of them code."""
    if not options.answers:
        return []
    half = options.answers // 2
    longest = min(96, CHUNK - options.answer_tokens - 1)
    asked = prompts(parts["prose"], options.answers - half, options.seed, (min(16, longest), longest))
    asked += prompts(parts["code"], half, options.seed + 1, (min(16, longest), longest))
    return [prompt if begin is None else [begin, *prompt] for prompt in asked]


def _same_in_batch(
    model: ScoredModel, asked: list[list[int]], options: Options, tick: Callable[[str], None]
) -> float | None:
    """Return the share of answers with a seed that are the same alone and in a batch."""
    if not asked:
        return None
    tick(f"answers of {model.name} alone and in a batch")
    together = model.sampled(asked, options.answer_tokens, together=True)
    if together is None:
        return None
    alone = model.sampled(asked, options.answer_tokens, together=False) or []
    return sum(one == other for one, other in zip(together, alone, strict=True)) / len(asked)


def _answers(
    models: Sequence[ScoredModel], asked: list[list[int]], options: Options, tick: Callable[[str], None]
) -> tuple[dict[str, int], dict[str, list[int]]]:
    """Return, by model, how many greedy answers are the reference's, and where the others part from it."""
    same: dict[str, int] = {}
    parted: dict[str, list[int]] = {}
    if not asked:
        return same, parted
    reference = models[0]
    own = None
    if options.generated:
        tick(f"answers of {reference.name}")
        own = reference.answers(asked, options.answer_tokens)
    for model in models[1:]:
        tick(f"answers of {model.name}")
        found = model.answers(asked, options.answer_tokens)
        places = []
        for number, (prompt, answer) in enumerate(zip(asked, found, strict=True)):
            expected = own[number] if own else _choices(reference, prompt, answer)
            differ = [place for place, pair in enumerate(zip(answer, expected, strict=True)) if pair[0] != pair[1]]
            places += differ[:1]
        same[model.name], parted[model.name] = len(asked) - len(places), places
    return same, parted


def _choices(model: ScoredModel, prompt: list[int], answer: list[int]) -> list[int]:
    """Return the model's likeliest token at each place of an answer, after the tokens before it."""
    return model.logits([*prompt, *answer])[len(prompt) - 1 : -1].argmax(axis=1).tolist()


def _quality(
    name: str, sums: _Sums, counts: dict[str, int], same: dict[str, int], parted: dict[str, list[int]], in_batch: float | None
) -> ModelQuality:
    kl = np.concatenate(sums.kl)
    places = parted.get(name, [])
    count = same[name] / (same[name] + len(places)) if name in same else None
    return ModelQuality(
        name=name, perplexity={text: float(np.exp(loss / counts[text])) for text, loss in sums.loss.items()},
        kl_mean=float(kl.mean()), kl_p999=float(np.quantile(kl, 0.999)), same_top=sums.same_top / sums.positions,
        same_answers=count, parted_at=places, same_in_batch=in_batch, seconds=round(sums.seconds, 1),
    )  # fmt: skip
