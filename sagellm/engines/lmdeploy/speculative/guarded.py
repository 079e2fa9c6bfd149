"""A foreign strategy behind a guard: nothing that it does or answers can stop the engine."""

import json
import logging
from collections.abc import Sequence
from itertools import islice
from operator import index
from typing import Any

from sagellm.accel.speculative.base import MAX_LOOKAHEAD, MAX_QUIET, Ask, SpeculativeStrategy
from sagellm.accel.speculative.halves import EXACT
from sagellm.accel.speculative.tree import Draft, DraftTree, parents_of
from sagellm.core.errors import SageError, SpeculationError

__all__ = ["GuardedStrategy"]

logger = logging.getLogger("sagellm")

RAISED = (Exception, SystemExit)


class GuardedStrategy:
    """`num_faults`: requests that it did something wrong with, and calls that belong to none. `first_fault`: in words."""

    def __init__(self, strategy: SpeculativeStrategy, vocab_size: int) -> None:
        self.strategy = strategy
        self.name = str(getattr(strategy, "name", type(strategy).__name__))
        self.num_faults, self.first_fault = 0, ""
        self._vocab_size = vocab_size
        self._joins = getattr(strategy, "joins", False) is True
        self._odd: set[str] = set()  # what made no sense before

    def lookahead(self) -> int:
        """At most so many guesses for a sequence, now: a strategy may change it at any time. 0 where it makes no sense."""
        return self._number("lookahead", MAX_LOOKAHEAD)

    def quiet(self) -> int:
        """So many steps from now on it need not be told of at once. 0 where it makes no sense, and where it does not hold."""
        value = self._number("quiet", MAX_QUIET)
        return value if value and self._joins and not self.lookahead() else 0

    def bind(self, target: Any) -> None:
        """Raises SpeculationError: it cannot work with this model."""
        try:
            self.strategy.bind(target)
        except SageError:
            raise
        except RAISED as error:
            raise SpeculationError(f"strategy {self.name} cannot work with this model: {_text_of(error)}") from error

    def tell(self, method: str, *arguments: Any) -> str:
        """Return what it did wrong in this call, or an empty text."""
        try:
            getattr(self.strategy, method)(*arguments)
        except RAISED as error:
            return f"{method}: {_text_of(error)}"
        return ""

    def accept(self, told: Sequence[tuple[int, tuple[int, ...]]]) -> list[tuple[int, str]]:
        """Requests and their new tokens; returns with whom it did what wrong."""
        faults, strategy = [], self.strategy
        for request, tokens in told:
            try:
                strategy.accept(request, tokens)
            except RAISED as error:
                faults.append((request, f"accept: {_text_of(error)}"))
        return faults

    def propose(self, asks: Sequence[Ask]) -> list[tuple[Draft, str]]:
        """Return for each ask its guesses, and what is wrong with them. Wrong ones are left out."""
        answers, why = self._propose(asks)
        if not why:
            return [self._checked(ask, answer) for ask, answer in zip(asks, answers, strict=True)]
        if len(asks) == 1:
            return [([], why)]
        found = [self.propose((ask,))[0] for ask in asks]  # one of them is at fault; the others keep their guesses
        return found if any(fault for _, fault in found) else [([], why)] * len(asks)

    def verify(self, draft: Draft, sampled: Sequence[int]) -> tuple[list[int], str]:
        """Return the guesses that stay, see `Verifier.verify`, and what is wrong with the strategy's choice. The exact one
        replaces a wrong one."""
        tokens, parents = list(draft), parents_of(draft)
        verifier = getattr(self.strategy, "verifier", EXACT)
        if verifier is EXACT:
            return EXACT.verify(tokens, parents, sampled), ""
        try:
            kept = [index(node) for node in verifier.verify(tuple(tokens), tuple(parents), tuple(sampled))]
            if [parents[node] for node in kept] == [-1, *kept][: len(kept)]:
                return kept, ""
            why = f"verify: {kept} is no path of guesses from the first token on"
        except RAISED as error:
            why = f"verify: {_text_of(error)}"
        return EXACT.verify(tokens, parents, sampled), why

    def count(self, why: str, request: int | None = None) -> None:
        """Something went wrong; the first time it is said, too."""
        self.num_faults += 1
        if not self.first_fault:
            self.first_fault = why
            of = "" if request is None else f", request {request}"
            logger.error("speculative strategy %s%s: %s; it goes on without guesses", self.name, of, why)

    def report(self) -> dict[str, Any]:
        try:
            own = self.strategy.report()
            json.dumps(own)
        except RAISED as error:
            own = {}
            self._count_once("report", f"report: {_text_of(error)}")
        return {"strategy": self.name, "faults": self.num_faults, "first_fault": self.first_fault, "own": own}

    def _number(self, name: str, most: int) -> int:
        try:
            value = index(getattr(self.strategy, name))
            if 0 <= value <= most:
                return value
            why = str(value)
        except RAISED as error:
            why = _text_of(error)
        self._count_once(name, f"its {name} makes no sense: {why}; it is a whole number from 0 to {most}")
        return 0

    def _count_once(self, name: str, why: str) -> None:
        if name not in self._odd:
            self._odd.add(name)
            self.count(why)

    def _propose(self, asks: Sequence[Ask]) -> tuple[list[Any], str]:
        try:
            # Nothing is taken from an iterator that has no end.
            answers = list(islice(iter(self.strategy.propose(tuple(asks))), len(asks) + 1))
        except RAISED as error:
            return [], f"propose: {_text_of(error)}"
        if len(answers) == len(asks):
            return answers, ""
        return [], f"propose: it answered {len(answers)} proposals, or more, for {len(asks)} sequences"

    def _checked(self, ask: Ask, answer: Any) -> tuple[Draft, str]:
        is_tree = isinstance(answer, DraftTree)
        try:
            guesses = answer.tokens if is_tree else [index(token) for token in islice(iter(answer), ask.limit + 1)]
        except RAISED as error:
            return [], f"propose: a proposal is a list of whole numbers ({_text_of(error)})"
        if len(guesses) > ask.limit:
            return [], f"propose: more than {ask.limit} tokens for a sequence; so many were allowed"
        for token in guesses:
            if not 0 <= token < self._vocab_size:
                return [], f"propose: token {token}; the vocabulary has 0 to {self._vocab_size - 1}"
        return (answer if is_tree and not answer.is_chain else guesses), ""


def _text_of(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
