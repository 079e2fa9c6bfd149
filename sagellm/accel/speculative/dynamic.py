"""Asks another strategy for as many guesses as pay, in a list or a tree, by measured acceptance, batch size and step times."""

import inspect
from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heapreplace
from pathlib import Path
from typing import Any

import numpy as np

from sagellm.accel.speculative.acceptance import SUREST, Acceptance
from sagellm.accel.speculative.base import Ask, SpeculativeStrategy, StepOutcome, TargetModel
from sagellm.accel.speculative.registry import find_speculator, make_speculator
from sagellm.accel.speculative.row_times import RowTimes
from sagellm.core.errors import SpeculationError

__all__ = ["DynamicLookaheadStrategy"]

DEFAULT_LOOKAHEAD = 8
MIN_GAIN = 0.025  # of throughput, that is worth the trouble
PURSE_START, PURSE_MOST = 0.75, 4.0  # plain steps
FIRST_PLAIN = 3  # steps without guesses at the start, of which the first may be slow
FIRST_PAUSE, LONGEST_PAUSE = 4, 256  # steps
HELD_UP = 1.5  # times what a step takes: a longer one says nothing about guesses
PROBE_SHARE = 0.005  # of all time, that probes may cost before pauses are as long as they get
PLAIN_EVERY = 64  # steps with guesses, after which one without them says what they are compared with
VARY_EVERY = 32  # steps with guesses, after which more, fewer or another shape are tried; at first sooner
LIST_OR_TREE = (False, True)  # as `Ask.tree`
SHAPE_NAMES = {None: "own", False: "chain", True: "tree"}


class DynamicLookaheadStrategy(SpeculativeStrategy):
    """Before each step it looks for the number of guesses, by request, with the most expected tokens a second.

    Losses are paid from a purse: `budget` of all time flows in, and what steps with guesses win or lose against plain steps.
    When it is empty, or nothing is expected to pay, the strategy is silent for a pause, then tries a guess or two on few
    sequences; pauses double as long as those fail. So work that cannot be guessed loses `budget` of its throughput and not
    more, beside the purse's first content of less than a step. While it is silent `lookahead` is 0, and no strategy is asked.

    It asks a strategy that `takes_shape` for chains or trees, whichever promise more tokens a second. Each has an acceptance of
    its own, and the other one is tried now and then. Trees win where several tokens are about as likely and rows are cheap.

    Deterministic: equal outcomes, equal guesses. In a pause it is `quiet`, unless the strategy wants each token at once.

    Args:
        strategy: whose guesses they are: an instance, or a name with its `options`.
        lookahead: largest number of guesses; by default that of the strategy, or 8 if it is given by name.
        table: JSON of `sagellm speculative profile`: step times to start from, in place of measuring them first.
        budget: share of time that may be lost to attempts.

    Raises:
        SpeculationError: bad options; a table that cannot be read.
    """

    name = "dynamic"

    def __init__(
        self, strategy: SpeculativeStrategy | str = "ngram", options: dict[str, Any] | None = None,
        lookahead: int | None = None, *, table: str | Path | None = None, budget: float = 0.01,
    ) -> None:  # fmt: skip
        self.wrapped = _wrapped(strategy, options, lookahead)
        super().__init__(self.wrapped.lookahead if lookahead is None else lookahead)
        if not (isinstance(budget, (int, float)) and 0 < budget < 1):
            raise SpeculationError(f"budget is {budget!r}; give a share of the time above 0 and below 1, such as 0.01.")
        self.models, self.joins, self.verifier = self.wrapped.models, self.wrapped.joins, self.wrapped.verifier
        self.takes_draws = self.wrapped.takes_draws
        self.most = min(self.lookahead, self.wrapped.lookahead)
        self.lookahead = self.most
        self.budget = float(budget)
        self.times = RowTimes(_table(table))
        self._shapes = LIST_OR_TREE if self.wrapped.takes_shape else (None,)
        self._shape = self._shapes[0]  # of the latest guesses
        self._of_shape = {shape: Acceptance(self.most) for shape in self._shapes}
        self._shape_steps = dict.fromkeys(self._shapes, 0)
        self._asked: dict[int, int] = {}  # of the step that runs: request -> guesses
        self._mode = ""
        self._num_sequences = 0  # of the latest step
        self._gain = 1.0  # that is expected: throughput by that without guesses
        self._ask_s = 0.0  # that a request costs which is asked about
        self._purse: float | None = None  # seconds; None: no plain step was seen yet
        self._pause, self._pause_left = FIRST_PAUSE, 0
        self._step = self._since_plain = self._num_active = 0
        self._vary_at, self._num_varied = 4, 0
        self._chosen = [0] * (self.most + 1)
        self._modes = {"silent": 0, "plain": 0, "probe": 0, "active": 0}

    @property
    def acceptance(self) -> Acceptance:
        """How likely guesses are right, in the shape that is in use."""
        return self._of_shape[self._shape]

    # ---- what the wrapped one is told

    def bind(self, target: TargetModel) -> None:
        self.wrapped.bind(target)

    def begin(self, request_id: int, tokens: np.ndarray) -> None:
        self.wrapped.begin(request_id, tokens)

    def accept(self, request_id: int, tokens: Sequence[int]) -> None:
        self.wrapped.accept(request_id, tokens)

    def end(self, request_id: int) -> None:
        for acceptance in self._of_shape.values():
            acceptance.forget(request_id)
        self.wrapped.end(request_id)

    # ---- a step

    @property
    def quiet(self) -> int:  # type: ignore[override]
        return self._pause_left if self.joins else 0

    def propose(self, asks: Sequence[Ask]) -> list[Sequence[int]]:
        wanted = self._wanted(asks)
        answers: list[Sequence[int]] = [()] * len(asks)
        # Not in place of what is there: after a fault the engine asks again, request by request.
        self._asked.update({ask.request_id: count for ask, count in zip(asks, wanted, strict=True) if count})
        places = [number for number, count in enumerate(wanted) if count]
        if places:
            asked = [asks[number]._replace(limit=wanted[number], tree=self._shape) for number in places]
            for number, guesses in zip(places, self.wrapped.propose(asked), strict=True):
                answers[number] = guesses
        for count in wanted:
            self._chosen[count] += 1
        return answers

    def step_done(self, outcome: StepOutcome) -> None:
        asked, mode, self._asked, self._mode = self._asked, self._mode or "silent", {}, ""
        num_sequences = self._num_sequences = len(outcome.verdicts)
        self._step += 1
        self._modes[mode] += 1
        self.times.add(num_sequences, outcome.num_rows, outcome.step_s)
        if mode == "silent" and self._pause_left > 1 and self._purse is not None and num_sequences and outcome.step_s > 0:
            self._pause_left -= 1  # the next step is silent, too: all that happens is that the purse fills
            self._purse += self.budget * outcome.step_s
            self._since_plain = 0
            self.wrapped.step_done(outcome)
            return
        plain_s = self.times.plain(num_sequences)
        num_right = 0
        for request, num_drafted, num_accepted in outcome.verdicts if asked else ():
            if count := asked.get(request):
                self.acceptance.add(request, count, num_drafted, num_accepted, self._step, outcome.paths.get(request))
                num_right += num_accepted
        if asked:
            self._shape_steps[self._shape] += 1
            self._ask_s += 0.1 * (outcome.propose_s / len(asked) - self._ask_s)
        self._pay(outcome, mode, num_right, plain_s)
        self._since_plain = self._since_plain + 1 if outcome.num_rows > num_sequences else 0
        if mode == "probe":
            self._probed(num_right, plain_s, outcome.num_rows - num_sequences)
        elif mode == "active":
            self._num_active += 1
            if self._purse is not None and self._purse <= 0:
                self._be_silent()
            elif self._num_active % 8 == 0:
                self._pause = FIRST_PAUSE
        elif mode == "silent" and self._pause_left:
            self._pause_left -= 1
            if not self._pause_left:
                for acceptance in self._of_shape.values():
                    acceptance.doubt()
        self.lookahead = 0 if self._pause_left else self.most
        self.wrapped.step_done(outcome)

    def report(self) -> dict[str, Any]:
        """`chosen`: how often a request was asked for 0, 1, ... guesses, while not silent. `steps`: by what they were for.
        `shapes`: steps with guesses, by the shape that was wanted. `acceptance`: of the shape in use."""
        return {
            "strategy": self.wrapped.name, "most": self.most, "chosen": list(self._chosen), "steps": dict(self._modes),
            "pause": self._pause, "purse_s": self._purse or 0.0, "ask_s": self._ask_s, "times": self.times.report(),
            "shapes": {SHAPE_NAMES[shape]: count for shape, count in self._shape_steps.items()},
            "acceptance": self.acceptance.report(), "own": self.wrapped.report(),
        }  # fmt: skip

    # ---- choices

    def _wanted(self, asks: Sequence[Ask]) -> list[int]:
        """Guesses for each."""
        none = [0] * len(asks)
        if self._pause_left:
            self._mode = "silent"
            return none
        num_sequences = max(len(asks), self._num_sequences)
        is_due = self._since_plain >= PLAIN_EVERY * min(4.0, self._gain)
        if is_due or self._purse is None or not self.times.knows(num_sequences):
            self._mode = "plain"
            return none
        plain_s = self.times.plain(num_sequences)
        counts = self._best(asks, num_sequences, plain_s)
        if any(counts) and self._purse > 0:
            self._mode = "active"
            return counts
        counts = self._probe(asks, num_sequences, plain_s)
        self._mode = "probe" if any(counts) else "plain"
        if not any(counts):
            self._be_silent()  # until more has flowed into the purse
            self._pause = min(self._pause, 8 * FIRST_PAUSE)
        return counts

    def _best(self, asks: Sequence[Ask], num_sequences: int, plain_s: float) -> list[int]:
        """Choose the shape and the numbers of guesses with the most expected tokens a second. None if no guess pays."""
        limits = [min(ask.limit, self.most) for ask in asks]
        curve = self.times.curve(num_sequences, min(sum(limits), self._boldest(num_sequences, plain_s)))
        shapes = self._shapes if all([ask.tree is None for ask in asks]) else self._shapes[:1]
        found = {shape: self._search(asks, limits, num_sequences, curve, shape) for shape in shapes}
        shape = max(found, key=lambda each: found[each][0])
        speed, best, order = found[shape]
        self._gain = speed * plain_s / num_sequences
        if self._gain < 1 + MIN_GAIN:
            return [0] * len(asks)
        if self._num_active >= self._vary_at:
            self._vary_at = self._num_active + min(VARY_EVERY, max(4, self._num_active // 4))
            self._num_varied += 1
            if len(found) > 1 and self._num_varied % 3 == 0:
                shape = next(each for each in found if each is not shape)
                _, other, order = found[shape]
                best = other or min(best, len(order))
            elif self._num_varied % 2:
                best = min(len(order), best + best // 2 + 1)
            else:
                best = max(1, best // 2)
        self._shape = shape
        counts = [0] * len(asks)
        for number in order[:best]:
            counts[number] += 1
        return counts

    def _search(
        self, asks: Sequence[Ask], limits: list[int], num_sequences: int, curve: Sequence[float], shape: bool | None
    ) -> tuple[float, int, list[int]]:  # fmt: skip
        """Return the highest speed, its number of guesses, and who gets the first guess, the second, and so on.

        The next guess goes to the sequence that gains most by it, so the best choice of each total is a start of one order,
        and one curve over totals is searched.
        """
        acceptance = self._of_shape[shape]
        filled = min(1.0, max(acceptance.filled, 0.02))
        best, speed, num_asked, tokens = 0, num_sequences / curve[0], 0, float(num_sequences)
        order: list[int] = []
        for number, place, gain in self._by_gain(acceptance, asks, limits, len(curve) - 1):
            order.append(number)
            num_asked += place == 0
            tokens += filled * gain
            rows = filled * len(order)
            low = int(rows)
            seconds = curve[low] + self._ask_s * num_asked
            if rows > low:
                seconds += (rows - low) * (curve[low + 1] - curve[low])
            if tokens / seconds > speed:
                best, speed = len(order), tokens / seconds
        return speed, best, order

    def _by_gain(
        self, acceptance: Acceptance, asks: Sequence[Ask], limits: list[int], most: int
    ) -> Iterator[tuple[int, int, float]]:
        """(who, place, chance of a further token) of `most` guesses, the likeliest first."""
        common = acceptance.by_place()
        scales = acceptance.scales([ask.request_id for ask in asks], self._step)
        heap = [(-min(common[0] * scale, SUREST), number, 0) for number, scale in enumerate(scales)]
        heapify(heap)
        for _ in range(most):
            minus, number, place = heap[0]
            yield number, place, -minus
            place += 1
            if place < limits[number]:
                heapreplace(heap, (minus * min(common[place] * scales[number], SUREST), number, place))
            else:
                heappop(heap)

    def _boldest(self, num_sequences: int, plain_s: float) -> int:
        """The most guesses of a step: twice what has been seen, and where nothing has, what the purse can pay."""
        seen = self.times.largest(num_sequences)
        if seen:
            return 2 * seen
        bearable = int(self._purse / (0.25 * plain_s / num_sequences)) if self._purse and self._purse > 0 else 0
        return max(1, min(bearable, max(4, num_sequences // 4)))

    def _probe(self, asks: Sequence[Ask], num_sequences: int, plain_s: float) -> list[int]:
        """A guess or two for few, in turn."""
        counts = [0] * len(asks)
        order = sorted(range(len(asks)), key=lambda number: self.acceptance.last_judged(asks[number].request_id))
        for size in (2, 1):
            few = order[: max(1, num_sequences // 8)]
            for number in few:
                counts[number] = min(size, asks[number].limit, self.most)
            rows = sum(counts)
            risk_s = self.times.plain(num_sequences, rows) - plain_s + self._ask_s * len(few)
            if self.times.largest(num_sequences) < rows:
                risk_s = max(risk_s, 0.5 * rows * plain_s / num_sequences)
            if risk_s <= (self._purse or 0.0):
                return counts
        return [0] * len(asks)

    def _pay(self, outcome: StepOutcome, mode: str, num_right: int, plain_s: float) -> None:
        num_sequences = len(outcome.verdicts)
        if not num_sequences or not outcome.step_s > 0:
            return
        if self._purse is None:
            if self._step >= FIRST_PLAIN:
                self._purse = PURSE_START * plain_s
            return
        self._purse += self.budget * outcome.step_s
        extra = outcome.num_rows - num_sequences
        if extra > 0:
            # A delay of this step would have delayed a plain one too.
            won_s = plain_s * (1 + num_right / num_sequences)
            usual_s = self.times.usual(num_sequences, extra)
            # The usual time of a new size is unknown until now, so its loss counts little.
            most_s = won_s + plain_s / 2 if usual_s is None else HELD_UP * usual_s
            self._purse += won_s - min(outcome.step_s, most_s)
        if mode != "silent":  # in silence no strategy was asked, and the rest of the time is the engine's
            self._purse -= max(0.0, outcome.propose_s)
        self._purse = min(max(self._purse, -plain_s), PURSE_MOST * plain_s)

    def _probed(self, num_right: int, plain_s: float, num_drafted: int) -> None:
        if num_right:
            return  # looks promising: again at once, if the purse can pay it
        # After a cheap probe the next one may come soon.
        cost_s = self.times.plain(self._num_sequences, num_drafted) - plain_s + self._ask_s
        longest = min(LONGEST_PAUSE, max(8 * FIRST_PAUSE, cost_s / (PROBE_SHARE * plain_s)))
        self._be_silent()
        self._pause = int(min(self._pause, longest))

    def _be_silent(self) -> None:
        self._pause_left = self._pause
        self._pause = min(2 * self._pause, LONGEST_PAUSE)


def _wrapped(strategy: Any, options: dict[str, Any] | None, lookahead: int | None) -> SpeculativeStrategy:
    if isinstance(strategy, DynamicLookaheadStrategy) or strategy in ("", "dynamic"):
        raise SpeculationError(f"dynamic of {strategy!r}: name the strategy that guesses, such as dynamic:ngram.")
    if isinstance(strategy, SpeculativeStrategy):
        if options:
            raise SpeculationError(f"options {options} with a strategy that is built already; give its name instead.")
        return strategy
    if not isinstance(strategy, str):
        raise SpeculationError(f"strategy is {strategy!r}; give a name, module:Class, or a SpeculativeStrategy.")
    if options is not None and not isinstance(options, dict):
        raise SpeculationError(f"options is {options!r}; give the options of {strategy}, by name.")
    if issubclass(find_speculator(strategy), DynamicLookaheadStrategy):
        raise SpeculationError(f"dynamic of {strategy!r}: name the strategy that guesses, such as dynamic:ngram.")
    options = dict(options or {})
    if "lookahead" in inspect.signature(find_speculator(strategy)).parameters:
        options.setdefault("lookahead", DEFAULT_LOOKAHEAD if lookahead is None else lookahead)
    return make_speculator(strategy, **options)


def _table(path: str | Path | None) -> Any:
    if path is None:
        return None
    from sagellm.accel.speculative.planning.table import read_table

    return read_table(Path(path))
