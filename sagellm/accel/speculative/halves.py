"""The two halves of a speculative step, each replaceable: a `DraftModel` guesses, a `Verifier` keeps what is right."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import numpy as np

from sagellm.accel.speculative.tree import Draft
from sagellm.core.errors import SpeculationError

__all__ = ["EXACT", "DraftModel", "ExactVerifier", "Verifier", "load_half"]


class DraftModel(ABC):
    """Guesses by the text alone. `SpeculativeStrategy` is the larger contract, with events, batches and a second model."""

    @abstractmethod
    def generate_draft(self, texts: Sequence[np.ndarray], limits: Sequence[int]) -> Sequence[Draft]:
        """Guess what follows.

        Args:
            texts: int64 [n] each, prompt and answer so far; read-only.
            limits: largest number of guesses of each, 1 or more.

        Returns:
            For each text a list of tokens, empty for none, or a `DraftTree`.
        """


class Verifier(ABC):
    """Chooses which guesses stay. One that keeps others than `ExactVerifier` changes answers; checks of an engine find it."""

    @abstractmethod
    def verify(self, tokens: Sequence[int], parents: Sequence[int], sampled: Sequence[int]) -> Sequence[int]:
        """Choose the guesses of one sequence that stay.

        Args:
            tokens: guesses, [n].
            parents: [n], the guess before each, -1 for none; parents come first. In a chain they are -1, 0, 1, ...
            sampled: [n + 1], the model's own tokens: behind the text, and behind each guess, drawn as without guesses.

        Returns:
            Numbers of guesses along a path from the first token on; none if all are wrong. The sequence gets these, and the
            model's token behind the last of them.
        """


class ExactVerifier(Verifier):
    """Keeps guesses that are the model's own tokens, so the answer is that of decoding without guesses."""

    def verify(self, tokens: Sequence[int], parents: Sequence[int], sampled: Sequence[int]) -> list[int]:
        kept, last = [], -1
        for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
            if parent == last and token == sampled[last + 1]:
                kept.append(node)
                last = node
        return kept


EXACT = ExactVerifier()


def load_half(spec: Any, base: type, **options: Any) -> Any:
    """Return an object of the class `module:Class`, or `spec` itself if it is one.

    Raises:
        SpeculationError: no such class, not one of `base`, or bad options.
    """
    if isinstance(spec, base):
        return spec
    module, _, name = spec.partition(":") if isinstance(spec, str) else ("", "", "")
    if not module or not name:
        raise SpeculationError(f"{base.__name__} is {spec!r}; give module:Class.")
    try:
        found = getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise SpeculationError(f"{spec} cannot be loaded: {error}.") from error
    if not (isinstance(found, type) and issubclass(found, base)):
        raise SpeculationError(f"{spec} is no {base.__name__}; extend sagellm.accel.{base.__name__}.")
    try:
        return found(**options)
    except TypeError as error:
        raise SpeculationError(f"{spec} cannot be built with {options}: {error}.") from error
