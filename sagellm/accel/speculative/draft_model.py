"""Guesses of a second, much smaller model, which runs beside the target and keeps keys and values of its own.

Before a decode step it first computes what it has not seen of each text, then guesses token by token, all texts together.
Keys and values of its own guesses stay valid as far as the guesses were accepted.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sagellm.accel.speculative.base import Ask, ModelRunner, SpeculativeStrategy, TargetModel, check_count
from sagellm.accel.speculative.tree import Draft, DraftTree
from sagellm.core.errors import SpeculationError

__all__ = ["DraftModelStrategy"]


class _Known:
    """State of a text in the draft model.

    Attributes:
        size: tokens of the text at the last proposal.
        valid: so many of them have keys and values.
        guesses: computed after them, all but the last.
        others: at each place beside a guess, other tokens.
        chances: of the guess at each place, and of each other token there.
        blocks: that hold it all, in order.
    """

    def __init__(self) -> None:
        self.size = self.valid = 0
        self.guesses: list[int] = []
        self.others: list[list[int]] = []
        self.chances: list[list[float]] = []
        self.blocks = np.empty(0, np.int64)

    def forget_guesses(self) -> None:
        self.guesses, self.others, self.chances = [], [], []

    def draft(self, limit: int, is_tree: bool) -> Draft:
        """The `limit` likeliest of all guesses. Others than the likeliest of a place have no guesses behind them."""
        if not is_tree or not any(self.others):
            return list(self.guesses)
        nodes, chance = [], 1.0  # minus chance, place, rank, token
        for place, (guess, others) in enumerate(zip(self.guesses, self.others, strict=True)):
            for rank, (token, share) in enumerate(zip((guess, *others), self.chances[place], strict=True)):
                nodes.append((-chance * share, place, rank, token))
            chance *= self.chances[place][0]
        numbers, tokens, parents, chances = {-1: -1}, [], [], []
        for minus, place, rank, token in sorted(nodes)[:limit]:
            if not rank:
                numbers[place] = len(tokens)
            tokens.append(token)
            parents.append(numbers[place - 1])
            chances.append(-minus)
        return DraftTree(tokens, parents, chances)

    def keep(self, ask: Ask, block_size: int) -> None:
        """Forget what `ask` shows to be wrong; at least its last token is to be computed anew."""
        if self.valid == self.size:
            for guess, token in zip(self.guesses[:-1], ask.tokens[self.size :], strict=False):
                if guess != token:
                    break
                self.valid += 1
        num = min(len(self.blocks), len(ask.blocks))
        differs = self.blocks[:num] != ask.blocks[:num]
        same = int(differs.argmax()) if differs.any() else num
        self.valid = min(self.valid, same * block_size, len(ask.tokens) - 1)
        self.size, self.blocks = len(ask.tokens), np.array(ask.blocks)
        self.forget_guesses()


class DraftModelStrategy(SpeculativeStrategy):
    """Asks a second model on the target's device, in the target's dtype, for its likeliest token, again and again.

    A step costs as many passes of that model as the longest list of guesses has tokens, all sequences together. It
    holds keys and values of its own, a block for each of the target's. It computes blocks again that the target loads
    from the host tier or finds in its prefix cache.

    Args:
        model: folder of a model with the tokenizer of the target; required.
        lookahead: largest number of guesses for a sequence and step, 1 to 64.
        min_probability: guesses end at a token that is less likely for the draft model.
        step_tokens: largest number of unread tokens to compute before a step of the target. A text gets no guesses until it is
            read to its end.
        top_k: likeliest tokens at each place, 1 to 8. Above 1 the guesses are a tree of up to `lookahead` tokens: the likeliest
            token is followed further, the others are leaves.

    Raises:
        SpeculationError: options out of range.
    """

    name = "draft"
    joins = True  # it looks at what it is asked about alone

    def __init__(
        self, model: str | Path | None = None, lookahead: int = 4, min_probability: float = 0.0, step_tokens: int = 512,
        top_k: int = 1,
    ) -> None:  # fmt: skip
        super().__init__(lookahead)
        if model is None:
            raise SpeculationError(
                "draft has no model; give the folder of a draft model: --speculative-options '{\"model\": \"FOLDER\"}', for "
                "dynamic:draft '{\"options\": {\"model\": \"FOLDER\"}}'."
            )
        if not isinstance(model, (str, Path)) or not str(model):
            raise SpeculationError(f"model is {model!r}; give the folder of a draft model with the target's tokenizer.")
        if isinstance(min_probability, bool) or not isinstance(min_probability, (int, float)) or not 0 <= min_probability < 1:
            raise SpeculationError(f"min_probability is {min_probability!r}; give a number from 0 to below 1.")
        if type(step_tokens) is not int or step_tokens < 1:
            raise SpeculationError(f"step_tokens is {step_tokens!r}; give a whole number of 1 or more.")
        self._top_k = check_count(self.name, "top_k", top_k, 1, 8)
        self.takes_shape = self._top_k > 1
        self.models = (Path(model),)
        self._min_probability, self._step_tokens = min_probability, step_tokens
        self._runner: ModelRunner | None = None
        self._block_size = 0
        self._known: dict[int, _Known] = {}
        self._num_forwards = self._num_tokens = 0

    def bind(self, target: TargetModel) -> None:
        self._runner, self._block_size = target.load(self.models[0]), target.block_size

    def begin(self, request_id: int, tokens: np.ndarray) -> None:
        self._known[request_id] = _Known()  # its blocks may be others than before, and hold anything

    def end(self, request_id: int) -> None:
        self._known.pop(request_id, None)

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        known = [self._known.setdefault(ask.request_id, _Known()) for ask in asks]
        for ask, state in zip(asks, known, strict=True):
            state.keep(ask, self._block_size)
        places = self._catch_up(asks, known)
        num = 1
        while places:
            # The token that a text has got last is not computed yet: it comes after `size` and the guesses before it.
            places = [place for place in places if known[place].guesses and asks[place].limit > num * self._width(asks[place])]
            if places:
                self._guess(
                    asks, known, places, [np.array(known[place].guesses[-1:]) for place in places],
                    [known[place].size + num - 1 for place in places],
                )  # fmt: skip
                places = [place for place in places if len(known[place].guesses) > num]
            num += 1
        return [state.draft(ask.limit, self._width(ask) > 1) for ask, state in zip(asks, known, strict=True)]

    def _width(self, ask: Ask) -> int:
        """Guesses of a place, which share the limit."""
        return 1 if ask.tree is False else self._top_k

    def _catch_up(self, asks: Sequence[Ask], known: list[_Known]) -> list[int]:
        """Compute what is missing, within the bound; places of the texts that lack nothing, with a first guess each."""
        rest, places, ends = self._step_tokens, [], []
        for place, (ask, state) in enumerate(zip(asks, known, strict=True)):
            missing = len(ask.tokens) - state.valid
            if ask.tokens[state.valid :].max() >= self._runner.vocab_size:
                continue  # the target has more tokens than its draft, and this text one of these
            if missing > self.lookahead + 1:  # more than a step of the target gives
                missing = min(missing, rest)
                rest -= missing
            if missing:
                places.append(place)
                ends.append(state.valid + missing)
        if not places:
            return []
        starts = [known[place].valid for place in places]
        rows = [asks[place].tokens[start:end] for place, start, end in zip(places, starts, ends, strict=True)]
        self._guess(asks, known, places, rows, starts)
        for place, end in zip(places, ends, strict=True):
            state = known[place]
            state.valid = end
            if end < state.size:
                state.forget_guesses()
        return [place for place in places if known[place].guesses]

    def _guess(
        self, asks: Sequence[Ask], known: list[_Known], places: list[int], rows: list[np.ndarray], num_before: list[int]
    ) -> None:
        """One step of the draft model; each text gets a guess, unless it is too unlikely."""
        blocks = [asks[place].blocks for place in places]
        self._num_forwards += 1
        self._num_tokens += sum(map(len, rows))
        if self._top_k > 1:
            best, shares = self._runner.forward_top(rows, num_before, blocks, self._top_k)
            for place, found, chances in zip(places, best.tolist(), shares.tolist(), strict=True):
                likely = sum([chance >= self._min_probability for chance in chances])
                if likely:
                    known[place].guesses.append(found[0])
                    known[place].others.append(found[1:likely])
                    known[place].chances.append(chances[:likely])
            return
        if self._min_probability:
            tokens, probabilities = self._runner.forward_scored(rows, num_before, blocks)
            likely = (probabilities >= self._min_probability).tolist()
        else:
            tokens, likely = self._runner.forward(rows, num_before, blocks), [True] * len(places)
        for place, token, is_likely in zip(places, tokens.tolist(), likely, strict=True):
            if is_likely:
                known[place].guesses.append(token)

    def report(self) -> dict[str, Any]:
        return {"model": str(self.models[0]), "forwards": self._num_forwards, "tokens": self._num_tokens}
