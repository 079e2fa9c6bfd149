"""Measures points of a profile on the real engine, a few seconds each."""

import itertools
import multiprocessing
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from sagellm.accel.speculative.planning.profile import PROBE, machine_facts
from sagellm.control_plane.sla.profile import FEWEST_POINTS, Point, Setup, SLAProfile, read_profile
from sagellm.core.cached_folder import default_cache_dir
from sagellm.core.config import SageConfig
from sagellm.core.engines import answer_greedily, open_engine
from sagellm.core.errors import ConfigError, EngineError
from sagellm.core.file_hashes import hash_files
from sagellm.core.hooks import Phase
from sagellm.models import find_model, prepare_model
from sagellm.models.folder import text_config
from sagellm.scheduler_ir.simulation.base import EngineShape, LinearCosts
from sagellm.scheduler_ir.simulation.requests import VirtualRequest
from sagellm.scheduler_ir.simulation.virtual_engine import VirtualEngine

__all__ = ["Grid", "measure_profile", "model_hashes"]

BLOCK_SIZE = 64
STEPS_BESIDE = 64  # decode steps of an answer of the engines beside the measured one
WARM_UP = 2  # steps of a point that do not count
MACHINE = ("processor", "cores", "versions")
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Grid:
    """Points to measure: each setup with each number of requests and each length of prompts.

    Attributes:
        steps: decode steps of each point.
        rounds: measurements of each point. The quickest counts, since other processes only add time; what they add on
            average is `SLAProfile.slowdown`.
        engines: that compute on this machine at once. All but the measured one decode meanwhile.
        max_kv_tokens: points with more tokens in KV blocks are left out; None: all are measured.

    Raises ConfigError: too few points for a fit and its error.
    """

    concurrencies: tuple[int, ...] = (1, 4, 16)
    prompt_tokens: tuple[int, ...] = (64, 512, 2048)
    tensor_parallel: tuple[int, ...] = (1,)
    lookaheads: tuple[int, ...] = (0,)
    steps: int = 16
    rounds: int = 2
    engines: int = 1
    max_kv_tokens: int | None = None
    places: tuple[tuple[int, int], ...] = field(init=False, default=())

    def __post_init__(self) -> None:
        places = tuple(
            (concurrency, tokens) for concurrency in self.concurrencies for tokens in self.prompt_tokens
            if self.max_kv_tokens is None or concurrency * (tokens + self.new_tokens(0)) <= self.max_kv_tokens
        )  # fmt: skip
        object.__setattr__(self, "places", places)
        if len(places) < FEWEST_POINTS or min(len({each[axis] for each in places}) for axis in (0, 1)) < 2:
            raise ConfigError(
                f"{len(places)} points of concurrency and prompt length; give at least {FEWEST_POINTS}, with two of each."
            )

    @property
    def setups(self) -> list[Setup]:
        return [(workers, lookahead) for workers in self.tensor_parallel for lookahead in self.lookaheads]

    def new_tokens(self, lookahead: int) -> int:
        """Return the tokens of an answer: its last steps have fewer guesses, and do not count."""
        return self.steps + WARM_UP + lookahead + 1


def measure_profile(
    model: str | None, out: Path, grid: Grid, settings: dict[str, Any], tick: Progress = lambda text: None
) -> SLAProfile:
    """Measure the points that the file lacks, and write it after each.

    Args:
        settings: of `SageConfig`: device, dtype, kv_schema, threads.

    Raises:
        ConfigError: the file is of another model, machine or settings, or no profile.
        SageError: the engine cannot start with one of the setups.
    """
    folder = prepare_model(find_model(model))
    profile = _begun(out, _facts(folder, settings) | {"engines": grid.engines})
    for setup in grid.setups:
        known = {(each.concurrency, each.prompt_tokens) for each in profile.of(setup)}
        missing = [place for place in grid.places if place not in known]
        if missing:
            profile = _measure_setup(folder, setup, missing, grid, settings, profile, out, tick)
    profile.write(out)
    return profile


def model_hashes(folder: Path) -> list[str]:
    """Return what tells a model from others, wherever it lies."""
    return hash_files([folder / "config.json", *sorted(folder.glob("*.safetensors"))], default_cache_dir())


def _facts(folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    return machine_facts() | {"model": folder.name, "hashes": model_hashes(folder), "settings": settings}


def _begun(out: Path, facts: dict[str, Any]) -> SLAProfile:
    if not out.exists():
        return SLAProfile(facts=facts)
    found = read_profile(out)
    known = {"engines": 1} | found.facts
    for name in (*MACHINE, "hashes", "settings", "engines"):
        if known.get(name) != facts[name]:
            raise ConfigError(
                f"{out} has points of another run: its {name} is {known.get(name)!r}, and here {facts[name]!r}. Give "
                "--out another file, or remove this one."
            )
    return found


def _measure_setup(
    folder: Path, setup: Setup, places: Sequence[tuple[int, int]], grid: Grid, settings: dict[str, Any],
    profile: SLAProfile, out: Path, tick: Progress,
) -> SLAProfile:  # fmt: skip
    workers, lookahead = setup
    new_tokens = grid.new_tokens(lookahead)
    lengths = [tokens + new_tokens + lookahead for _, tokens in places]
    needed = max(each * (-(-tokens // BLOCK_SIZE) + 1) for (each, _), tokens in zip(places, lengths, strict=True))
    guesses = {"speculative": PROBE, "speculative_options": {"lookaheads": [lookahead]}} if lookahead else {}
    config = SageConfig(
        model=folder, tensor_parallel=workers, block_size=BLOCK_SIZE, kv_blocks=needed + 16, prefix_caching=False,
        max_batch_size=max(each for each, _ in places), context_length=_context(folder, max(lengths)), decode_round=1,
        **guesses, **settings,
    )  # fmt: skip
    tick(f"{workers} workers, {lookahead} guesses: the engine starts")
    with _neighbours(grid.engines - 1, config, *places[len(places) // 2]), closing(open_engine(config)) as engine:
        vocab_size = int(text_config(folder)["vocab_size"])
        budget = engine.engine.cache_config.max_prefill_token_num
        schema = engine.info.kv_schema
        about = {
            "device": engine.info.device, "block_bytes": schema.block_bytes, "block_size": schema.block_size,
            "kv_dtype": schema.dtype, "max_prefill_tokens": budget,
        }  # fmt: skip
        profile = profile.model_copy(update={"facts": profile.facts | about | {f"block_bytes_{workers}": schema.block_bytes}})
        random = np.random.default_rng(0)
        answer_greedily(engine, random.integers(0, vocab_size, (2, min(512, max(lengths) // 2))).tolist(), 8)
        for _ in range(grid.rounds):  # each point at several moments: what slows the machine for a while slows others alike
            for concurrency, tokens in places:
                tick(f"{workers} workers, {lookahead} guesses: {concurrency} requests of {tokens} tokens")
                prompts = random.integers(0, vocab_size, (concurrency, tokens)).tolist()
                answers = answer_greedily(engine, prompts, new_tokens)
                profile = profile.add(_point(setup, tokens, [each.token_s for each in answers], budget))
                profile.write(out)
    return profile


@contextmanager
def _neighbours(num: int, config: SageConfig, concurrency: int, prompt_tokens: int) -> Iterator[None]:
    """Run further engines on this machine that decode all the time.

    Raises EngineError: one of them does not start.
    """
    spawn = multiprocessing.get_context("spawn")
    ready = spawn.Semaphore(0)
    processes = [
        spawn.Process(target=_decode_always, args=(config, concurrency, prompt_tokens, ready)) for _ in range(num)
    ]
    for each in processes:
        each.start()
    try:
        for each in processes:
            while not ready.acquire(timeout=0.2):
                if not each.is_alive():
                    raise EngineError("an engine beside the measured one has ended; see its message above.")
        yield
    finally:
        for each in processes:
            each.terminate()
        for each in processes:
            each.join()


def _decode_always(config: SageConfig, concurrency: int, prompt_tokens: int, ready: Any) -> None:
    with closing(open_engine(config)) as engine:
        random, vocab_size = np.random.default_rng(1), int(text_config(Path(str(config.model)))["vocab_size"])
        for number in itertools.count():
            prompts = random.integers(0, vocab_size, (concurrency, prompt_tokens)).tolist()
            answer_greedily(engine, prompts, min(STEPS_BESIDE, config.context_length - prompt_tokens))
            if number == 0:
                ready.release()
            if not multiprocessing.parent_process().is_alive():
                return


def _context(folder: Path, tokens: int) -> int:
    """Return the context length of the engine. Raises ConfigError: the model is shorter."""
    longest = int(text_config(folder).get("max_position_embeddings", tokens))
    if tokens > longest:
        raise ConfigError(f"prompts and answers of {tokens} tokens exceed the {longest} of this model; give shorter prompts.")
    return tokens


def _point(setup: Setup, prompt_tokens: int, token_s: Sequence[Sequence[float]], budget: int) -> Point:
    """Make a point of the times of every token of every stream."""
    begin, end = max(each[0] for each in token_s), min(each[-1] for each in token_s)
    gaps: list[float] = []
    for times in token_s:
        steps = sorted({each for each in times if begin <= each <= end})  # right guesses come with the same step
        gaps += np.diff(steps)[WARM_UP:][: -setup[1] or None].tolist()
    if not gaps:
        raise ConfigError("the streams of a point did not decode at the same time; measure more --steps.")
    step_s = statistics.median(gaps)
    # LMDeploy lets the first requests decode before the last prompts of a large batch.
    num_between = max(sum(each < begin for each in times) - 1 for times in token_s)
    prefill_s = begin - max(num_between, 0) * step_s
    context = prompt_tokens + statistics.mean(map(len, token_s)) / 2
    return Point(
        tensor_parallel=setup[0], lookahead=setup[1], concurrency=len(token_s), prompt_tokens=prompt_tokens,
        context_tokens=context, step_s=step_s, num_steps=len(gaps) // len(token_s) or 1,
        mean_step_s=statistics.mean(gaps),
        prefill_s=prefill_s if prefill_s > begin / 2 else None,
        prefill_terms=_prefill_terms(len(token_s), prompt_tokens, budget),
    )  # fmt: skip


def _prefill_terms(concurrency: int, prompt_tokens: int, budget: int) -> tuple[float, float, float]:
    """Return steps, tokens and pairs of the prompts, which the virtual engine shares out among steps as LMDeploy does."""
    blocks = concurrency * (-(-prompt_tokens // BLOCK_SIZE) + 1)
    shape = EngineShape(BLOCK_SIZE, blocks, budget, concurrency, prefix_caching=False)
    requests = [VirtualRequest(number, 0.0, prompt_tokens, 1) for number in range(concurrency)]
    engine = VirtualEngine(shape, LinearCosts((1.0, 0.0, 0.0), (1.0, 0.0, 0.0)), requests)
    engine.run()
    steps = [each for each in engine.steps if each.phase is Phase.PREFILL]
    return len(steps), sum(each.num_tokens for each in steps), sum(each.attention for each in steps)
