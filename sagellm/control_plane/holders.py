"""Which engines have which beginnings of prompts: one table for all, so that a look costs the same for thousands of engines."""

import itertools
from bisect import bisect_right
from collections.abc import Container, Iterable, Sequence

from sagellm.control_plane.base import Candidates

__all__ = ["PLACES", "Holders", "blocks_before", "marks", "marks_within", "num_held"]

MAX_COMPARED = 8  # engines with the same prefix whose loads are compared
# A mark ends a number of blocks that is one of these: each up to 8, then four in each doubling.
PLACES = (*range(1, 8), *(step * place for step in (2**power for power in range(20)) for place in (8, 10, 12, 14)))


class Holders:
    """Hash of a prefix -> engines that have it. An engine with a prefix has every shorter one of the same prompt."""

    def __init__(self) -> None:
        self._of: dict[int, str | set[str]] = {}  # most prefixes have one holder, and a set takes 200 bytes

    def __len__(self) -> int:
        """Return the number of prefixes that an engine has."""
        return len(self._of)

    def add(self, engine: str, hashes: Iterable[int]) -> None:
        of = self._of
        for each in hashes:
            have = of.setdefault(each, engine)
            if have is engine:
                continue
            if type(have) is set:
                have.add(engine)
            elif have != engine:
                of[each] = {have, engine}

    def drop(self, engine: str, hashes: Iterable[int]) -> None:
        for each in hashes:
            have = self._of.get(each)
            if type(have) is set:
                have.discard(engine)
                if not have:
                    del self._of[each]
            elif have == engine:
                del self._of[each]

    def longest(self, hashes: Sequence[int], among: Candidates) -> tuple[int, str]:
        """Return how many of the first hashes an engine has, and of those with most of them the one with the least load.

        The name is empty if no engine has any.

        Args:
            hashes: of longer and longer prefixes of a prompt.
        """
        of, least = self._of, among.least_name()
        for num in range(num_held(hashes, of), 0, -1):
            have = of.get(hashes[num - 1])  # a snapshot that is here in part may lack it
            holders = have if type(have) is set else (have,)
            if least in holders:
                return num, least
            some = list(itertools.islice(filter(among.has, holders), MAX_COMPARED))
            if some:
                return num, min(some, key=among.queue)
        return 0, ""


def num_held(hashes: Sequence[int], held: Container[int], most: int | None = None) -> int:
    """Return how many of the first hashes are held. None is held without those before it.

    Args:
        most: how many can be held; None: all.
    """
    low, high = 0, len(hashes) if most is None else most
    while low < high:  # `bisect` with a function as its key takes twice as long
        middle = (low + high) // 2
        if hashes[middle] in held:
            low = middle + 1
        else:
            high = middle
    return low


def marks(hashes: list[int]) -> list[int]:
    """Return the hashes that are remembered of a prompt which was sent somewhere.

    Args:
        hashes: of each prefix of whole blocks.
    """
    return [hashes[place - 1] for place in PLACES[: marks_within(len(hashes))]]


def blocks_before(num_marks: int) -> int:
    """Return how many blocks of a prompt so many marks stand for."""
    return PLACES[num_marks - 1] if num_marks else 0


def marks_within(num_blocks: int) -> int:
    """Return how many marks a prompt of so many blocks has."""
    return bisect_right(PLACES, num_blocks)
