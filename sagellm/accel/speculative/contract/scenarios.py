"""Scenarios that play requests on a strategy alone, without an engine, and report the rules that it breaks."""

import gc
import random
import tracemalloc
from collections.abc import Callable, Sequence
from operator import index
from pathlib import Path
from typing import Any

import numpy as np

from sagellm.accel.speculative.base import (
    MAX_LOOKAHEAD,
    MAX_QUIET,
    Ask,
    Draw,
    SpeculativeStrategy,
    StepOutcome,
    Verdict,
)
from sagellm.accel.speculative.contract.small_model import BLOCK_SIZE, VOCAB_SIZE, SmallTarget
from sagellm.accel.speculative.tree import Draft, DraftTree
from sagellm.core.contract import Broke, Played, Report, Scenario
from sagellm.core.errors import SpeculationError

__all__ = ["SCENARIOS"]

Make = Callable[..., SpeculativeStrategy]

NUM_STEPS = 80
NUM_CHURN = 50  # requests that come and go in each phase of the memory check
NUM_NEAR = 64  # free blocks of which the next one is taken: those that were given back last
KEPT_BYTES = 100_000  # that may stay of them: what is kept on purpose has a bound, and reaches it in the phase before


class Play:
    """Texts that repeat themselves, decoded by a machine that takes guesses at random. `is_late`: the strategy is told of quiet
    steps as late as may be."""

    def __init__(self, make: Make, seed: int, report: Report, is_late: bool = False) -> None:
        self._is_late, self._quiet = is_late, 0
        self._late: list[StepOutcome] = []
        self._late_tokens: dict[int, tuple[int, ...]] = {}
        self._report, self._draw = report, random.Random(seed)
        self.seen: set[str] = set()
        self.num_events = 0
        self.guesses: list[Draft] = []
        self.texts: dict[int, list[int]] = {}
        self._target = SmallTarget(lambda why: report("models", f"a model was asked for nonsense: {why}"))
        self._free = list(range(self._target.num_blocks))
        self._blocks: dict[int, list[int]] = {}
        self._strategy = make()
        self.call("bind", self._target)
        self._look_at_models()

    def call(self, method: str, *arguments: Any) -> Any:
        self.num_events += 1
        self.seen.add("raises_nothing")
        try:
            return getattr(self._strategy, method)(*arguments)
        except (Exception, SystemExit) as error:
            self._report("raises_nothing", f"{method} raised {type(error).__name__}: {error}; it has to answer.")
            raise Broke from error

    def begin(self, request: int, size: int | None = None) -> None:
        draw = self._draw
        word = [draw.randrange(3, 40) for _ in range(draw.randint(1, 9))]
        size = size or draw.choice((1, 2, 17, 64, 300))
        self.texts[request] = (word * (size // len(word) + 1))[:size]
        self.come(request)

    def come(self, request: int) -> None:
        """For the first time, or again: its blocks are others, or those that it had and others wrote in."""
        if self._draw.random() < 0.5:
            self._give_back(request)
        self._target.lose(self._blocks.get(request, ()))
        self.tell()
        self.call("begin", request, _array(self.texts[request]))

    def step(self, requests: list[int], is_told: bool = True) -> None:
        """One decode step of these, told of or not. Without guesses where there are to be none."""
        if self._quiet or not self.lookahead():
            self._decoded(requests, [[] for _ in requests], is_told)
            return
        asks = tuple([self._ask(request) for request in requests])
        before = [(ask.tokens.copy(), ask.blocks.copy()) for ask in asks]
        self._target.ask(asks)
        answers = self.call("propose", asks)
        if self._target.is_used:
            self.seen.add("models")
        for ask, (tokens, blocks) in zip(asks, before, strict=True):
            self.seen.add("leaves_asks")
            if not (np.array_equal(ask.tokens, tokens) and np.array_equal(ask.blocks, blocks)):
                self._report("leaves_asks", "it wrote into what it was asked about; copy what is to be changed.")
        drafts = self._judged(asks, answers)
        self.guesses += drafts
        self._decoded(requests, drafts, is_told)

    def _decoded(self, requests: list[int], drafts: Sequence[Draft], is_told: bool) -> None:
        verdicts, context = [], sum(len(self.texts[request]) for request in requests)
        for request, draft in zip(requests, drafts, strict=True):
            kept = self._draw.randint(0, len(draft))
            right = draft.path_tokens(kept - 1) if isinstance(draft, DraftTree) else draft[:kept]
            given = (*right, self._draw.randrange(3, 40))
            self.texts[request] += given
            if is_told:
                self._late_tokens[request] = self._late_tokens.get(request, ()) + given
            verdicts.append(Verdict(request, len(draft), len(right)))
        rows = sum(len(draft) + 1 for draft in drafts)
        self._late.append(StepOutcome(tuple(verdicts), rows, context, 0.01 + rows * 1e-4, 1e-4))
        self._quiet -= 1
        if self._quiet <= 0:
            self.tell()

    def tell(self) -> None:
        """All that the strategy has not heard of."""
        if not self._late:
            return
        for request, tokens in self._late_tokens.items():
            self.call("accept", request, tokens)
        for outcome in self._late:
            self.call("step_done", outcome)
        self._late, self._late_tokens = [], {}
        self._quiet = self.quiet() if self._is_late else 0

    def quiet(self) -> int:
        """Reported where it makes no sense; 0 where it does not hold."""
        self.seen.add("quiet")
        try:
            value = index(self._strategy.quiet)
        except (AttributeError, TypeError):
            value = -1
        if 0 <= value <= MAX_QUIET:
            return value if value and self._strategy.joins and not self.lookahead() else 0
        shown = getattr(self._strategy, "quiet", "missing")
        self._report("quiet", f"quiet is {shown!r}; keep a whole number from 0 to {MAX_QUIET}.")
        raise Broke

    def end(self, request: int) -> None:
        self.texts.pop(request, None)
        self._give_back(request)
        self.tell()
        self.call("end", request)

    def _ask(self, request: int) -> Ask:
        tokens = self.texts[request]
        limit = self._draw.choice((1, 2, 5, self.lookahead()))
        limit = max(1, min(limit, self.lookahead()))
        held = self._blocks.setdefault(request, [])
        while len(held) * BLOCK_SIZE < len(tokens) + limit:
            held.append(self._free.pop(-self._draw.randint(1, min(NUM_NEAR, len(self._free)))))
        tree = self._draw.choice((None, False, True)) if self._strategy.takes_shape else None
        draw = None
        if self._strategy.takes_draws and request % 3:
            draw = Draw([self._draw.choice((0.25, 0.5, 0.75)) for _ in range(limit + 1)], (0.7, 0, 1.0, 0.0))
        return Ask(request, _array(tokens), limit, _array(held), tree, draw)

    def _give_back(self, request: int) -> None:
        self._free += self._blocks.pop(request, ())

    def _look_at_models(self) -> None:
        try:
            named = {Path(folder) for folder in self._strategy.models}
        except (AttributeError, TypeError) as error:
            self._report("models", f"`models` is no row of folders: {error}.")
            return
        loaded = set(self._target.loaded)
        if loaded - named:
            self._report("models", f"bind loads {_shown(loaded - named)}, which `models` lacks; name what it loads.")
        elif named - loaded:
            self._report("models", f"`models` names {_shown(named - loaded)}, which bind does not load; name what it loads.")
        elif not named:
            self.seen.add("models")

    def lookahead(self) -> int:
        """Reported where it makes no sense; a strategy may change it from step to step."""
        self.seen.add("lookahead")
        try:
            value = index(self._strategy.lookahead)
        except (AttributeError, TypeError):
            value = -1
        if 0 <= value <= MAX_LOOKAHEAD:
            return value
        shown = getattr(self._strategy, "lookahead", "missing")
        self._report("lookahead", f"lookahead is {shown!r}; keep a whole number from 0 to {MAX_LOOKAHEAD}.")
        raise Broke

    def _judged(self, asks: tuple[Ask, ...], answers: Any) -> list[Draft]:
        self.seen |= {"answers", "limits", "shape", "vocabulary"}
        try:
            lists = [answer if isinstance(answer, DraftTree) else [index(token) for token in answer] for answer in answers]
        except TypeError as error:
            self._report(
                "answers", f"propose returned {answers!r}"[:200] + f" ({error}); return lists of whole numbers, or trees."
            )
            return [[] for _ in asks]
        if len(lists) != len(asks):
            self._report("answers", f"propose returned {len(lists)} lists for {len(asks)} asks; return one for each.")
            return [[] for _ in asks]
        for ask, guesses in zip(asks, lists, strict=True):
            if len(guesses) > ask.limit:
                self._report("limits", f"{len(guesses)} guesses where {ask.limit} were allowed; give no more.")
            if ask.tree is False and isinstance(guesses, DraftTree):
                self._report("shape", "a tree where a list was wanted; look at `tree` of each ask, or leave `takes_shape` off.")
            if odd := [token for token in guesses if not 0 <= token < VOCAB_SIZE]:
                self._report("vocabulary", f"token {odd[0]}; the vocabulary has 0 to {VOCAB_SIZE - 1}.")
        return [
            guesses if len(guesses) <= ask.limit and all(0 <= token < VOCAB_SIZE for token in guesses) else []
            for ask, guesses in zip(asks, lists, strict=True)
        ]

    def crowd(self) -> "Play":
        """Requests that come, go, come back after they lost their place, and are left out of steps."""
        draw, names = self._draw, iter(range(7, 10_000))
        for _ in range(NUM_STEPS):
            if (len(self.texts) < 6 and draw.random() < 0.5) or not self.texts:
                self.begin(next(names))
            chosen = [request for request in self.texts if draw.random() < 0.8]
            if chosen:
                self.step(chosen)
            if draw.random() < 0.1:
                again = draw.choice(list(self.texts))
                self.come(again)
            if draw.random() < 0.1:
                self.end(draw.choice(list(self.texts)))
        return self


def crowd(make: Make, seed: int, report: Report) -> Played:
    first, second = Play(make, seed, report).crowd(), Play(make, seed, report).crowd()
    if first.guesses != second.guesses:
        report("deterministic", "the same requests were guessed at otherwise; take a seed for what is random.")
        return Played(first.num_events, first.seen | {"deterministic"})
    late = Play(make, seed, report, is_late=True).crowd()
    if first.guesses != late.guesses:
        report(
            "quiet", "it guesses otherwise when it is told late of steps that it called quiet; join them, or leave `quiet` 0."
        )
    return Played(first.num_events, first.seen | {"deterministic"} | late.seen)


def strangers(make: Make, seed: int, report: Report) -> Played:
    """Requests that were never begun, steps that nothing was told of, ends twice, and names that come again."""
    play = Play(make, seed, report)
    play.end(1)
    play.texts[2] = [5, 6, 5, 6, 5]
    play.step([2])
    play.begin(3, 40)
    for _ in range(5):
        play.step([2, 3], is_told=False)
    play.end(3)
    play.call("accept", 3, (4, 5))
    play.begin(3, 10)
    play.step([3])
    play.end(3)
    play.end(3)
    return Played(play.num_events, play.seen | {"strangers"})


def churn(make: Make, seed: int, report: Report) -> Played:
    """Measure what stays of requests that ended. The first phase fills what a strategy keeps on purpose."""
    play = Play(make, seed, report)

    def phase(first: int) -> None:
        for request in range(first, first + NUM_CHURN):
            play.begin(request, 200)
            play.step([request])
            play.end(request)
        play.guesses.clear()
        gc.collect()

    phase(0)
    is_mine = not tracemalloc.is_tracing()
    if is_mine:
        tracemalloc.start()
    try:
        phase(NUM_CHURN)
        before = tracemalloc.get_traced_memory()[0]
        phase(2 * NUM_CHURN)
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        if is_mine:
            tracemalloc.stop()
    if grown > KEPT_BYTES:
        report(
            "forgets", f"{NUM_CHURN} requests that ended left {grown} bytes; give them back in `end`, or keep a bound."
        )
    return Played(0, play.seen | {"forgets"})


def options(make: Make, seed: int, report: Report) -> Played:
    for value in (0, -1, MAX_LOOKAHEAD + 1, "4"):
        try:
            make(lookahead=value)
        except SpeculationError:
            continue
        except TypeError as error:
            if "lookahead" in str(error) and "unexpected" in str(error):
                break  # it has no such option
            report("options", f"lookahead {value!r} raised {type(error).__name__}: {error}; raise SpeculationError.")
        except Exception as error:
            report("options", f"lookahead {value!r} raised {type(error).__name__}: {error}; raise SpeculationError.")
        else:
            report("options", f"lookahead {value!r} was taken; raise SpeculationError.")
    return Played(0, {"builds", "options"})


def _shown(folders: set[Path]) -> str:
    return ", ".join(sorted(map(str, folders)))


def _array(tokens: list[int]) -> np.ndarray:
    made = np.array(tokens, np.int64)
    made.flags.writeable = False
    return made


SCENARIOS = {
    "options": Scenario(options),
    "crowd": Scenario(crowd, is_random=True),
    "strangers": Scenario(strangers, is_random=True),
    "requests that end": Scenario(churn),
}
