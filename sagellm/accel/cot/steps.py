"""Steps of a chain of thought: where a text is split, what was guessed of each step, and what the model corrected."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from sagellm.core.errors import ConfigError
from sagellm.core.running import Draft

__all__ = ["SPLITS", "CoTStep", "Correction", "Split", "cut", "find_split", "make_steps"]

Split = Callable[[str], list[int]]

LINE = re.compile(r"\n\s*(?=\S)")
SENTENCE = re.compile(r"(?:[.!?][\"')\]]*\s+|\n\s*)(?=\S)")
NUMBERED = re.compile(r"\s*\d+\.$")  # the number of a list's item is no sentence


class Correction(NamedTuple):
    """The model parted from a guess. `place`: token of the step; `drafted`: the guess; `written`: the model's token."""

    place: int
    drafted: int
    written: int


@dataclass(frozen=True)
class CoTStep:
    """A step of a chain.

    Attributes:
        text, token_ids: what the chain says.
        draft_tokens: guesses at this step, in the order of the passes that verified them.
        verification_result: for each of them, whether it was right and saved a pass. A guess behind a wrong one never is, and
            a guess of the token that ends the chain saves none.
        corrections: where the model parted from guesses, one for each pass at most.
        is_judged: whether the step is a draft that a judge let pass. The model would perhaps not have written it.
    """

    text: str
    token_ids: tuple[int, ...]
    draft_tokens: tuple[int, ...] = ()
    verification_result: tuple[bool, ...] = ()
    corrections: tuple[Correction, ...] = ()
    is_judged: bool = False

    @property
    def num_accepted(self) -> int:
        return sum(self.verification_result)


def _lines(text: str) -> list[int]:
    return [found.end() for found in LINE.finditer(text) if text[: found.start()].strip()]


def _sentences(text: str) -> list[int]:
    starts = []
    for found in SENTENCE.finditer(text):
        line = text[text.rfind("\n", 0, found.start()) + 1 : found.start() + 1]
        if text[: found.end()].strip() and not NUMBERED.fullmatch(line):
            starts.append(found.end())
    return starts


SPLITS: dict[str, Split] = {"line": _lines, "sentence": _sentences}


def find_split(rule: str) -> Split:
    """Return the function that gives the places in a text where further steps begin.

    Args:
        rule: a name of `SPLITS`, or a marker. Each step but the first begins with the marker.

    Raises:
        ConfigError: the marker is blank.
    """
    if rule in SPLITS:
        return SPLITS[rule]
    if not rule.strip():
        raise ConfigError(f"split is {rule!r}; give {', '.join(SPLITS)}, or a marker such as 'Step '.")
    return lambda text: [found.start() for found in re.finditer(re.escape(rule), text) if text[: found.start()].strip()]


def cut(tokens: Sequence[int], split: Split, tokenizer: Any) -> list[int]:
    """Return the numbers of the tokens with which further steps begin. A token on both sides of a border begins a step."""

    def length(count: int) -> int:
        return len(tokenizer.decode(tokens[:count], skip_special_tokens=True))

    begins: list[int] = []
    for start in split(tokenizer.decode(tokens, skip_special_tokens=True)):
        low, high = begins[-1] if begins else 0, len(tokens)
        while low < high:  # the most tokens whose text ends at the border or before
            middle = (low + high + 1) // 2
            low, high = (middle, high) if length(middle) <= start else (low, middle - 1)
        if low > (begins[-1] if begins else 0) and low < len(tokens):
            begins.append(low)
    return begins


def make_steps(tokens: Sequence[int], drafts: Sequence[Draft], split: Split, tokenizer: Any) -> tuple[CoTStep, ...]:
    """Split a chain, and give each step what was guessed of it.

    Args:
        tokens: all of the chain.
        drafts: guesses, by their places in the chain. A right guess belongs to the step of its token. A wrong one and those
            behind it belong to the step of the model's token.
    """
    borders = [0, *cut(tokens, split, tokenizer), len(tokens)] if tokens else []
    spans = list(pairwise(borders))
    guesses: list[list[tuple[int, bool]]] = [[] for _ in spans]
    corrections: list[list[Correction]] = [[] for _ in spans]
    number = covered = 0
    for place, drafted in drafts:
        if not covered <= place < len(tokens):
            continue  # of a pass whose tokens the engine dropped, or behind the end
        right = 0
        for guess, token in zip(drafted, tokens[place:-1], strict=False):
            if guess != token:
                break
            right += 1
        covered = place + right + 1
        for offset, guess in enumerate(drafted):
            at = min(place + min(offset, right), len(tokens) - 1)
            while at >= spans[number][1]:
                number += 1
            guesses[number].append((guess, offset < right))
            if offset == right and guess != tokens[at]:
                corrections[number].append(Correction(at - spans[number][0], guess, tokens[at]))
    return tuple(
        CoTStep(
            tokenizer.decode(tokens[begin:end], skip_special_tokens=True), tuple(tokens[begin:end]),
            tuple(guess for guess, _ in told), tuple(is_right for _, is_right in told), tuple(parted),
        )
        for (begin, end), told, parted in zip(spans, guesses, corrections, strict=True)
    )  # fmt: skip
