"""How likely a guess is right: by place, and by request.

Plain Python throughout: it is asked between two steps of a model, when nothing is in the caches, and there a few lines over
lists take a fraction of what a dozen calls of numpy do.
"""

from collections.abc import Sequence
from typing import Any

__all__ = ["SUREST", "Acceptance"]

FORGET = 0.99  # of what all requests tell, with each guess that was judged
FORGET_REQUEST = 0.92
FADE = 0.97  # of what a request tells, with each step that goes by: one that failed is tried again
OLD_WEIGHT = 4.0  # guesses that count as much as all that is known from before a pause
PRIOR, PRIOR_WEIGHT, PLACE_WEIGHT = 0.7, 2.0, 8.0  # the last: of the place before
SUREST = 0.999  # chance of a guess
LEAST_SHARE = 1e-6
LEND = 10.0  # guesses of the request itself that count as much as those of all others


class _Record:
    """Guesses of one request that were judged, and right: both fade."""

    __slots__ = ("judged", "right", "step")

    def __init__(self, step: int) -> None:
        self.judged = self.right = 0.0
        self.step = step

    def fade(self, step: int) -> None:
        if step > self.step:
            share = FADE ** (step - self.step)
            self.judged *= share
            self.right *= share
            self.step = step


class Acceptance:
    """The chance of each place, given that all guesses before it were right. A place without data is like the one
    before it. A request without data is like all others.

    In a tree a place is the number of a guess, and what counts is how often that guess was right, whatever stands before it. A
    strategy gives the likelier guesses first. The chance of a place is then the quotient of this share and that of the place
    before, so that products of chances are shares, as in a chain.

    Args:
        lookahead: places.
    """

    def __init__(self, lookahead: int) -> None:
        self._judged = [0.0] * lookahead
        self._right = [0.0] * lookahead
        self._records: dict[int, _Record] = {}
        self.filled = 1.0  # guesses that come, of those that are asked for
        self._is_tree = False

    def add(
        self, request_id: int, asked: int, num_drafted: int, num_accepted: int, step: int, path: Sequence[int] | None = None
    ) -> None:
        """Take a step, by its number, in which `asked` guesses of a request were wanted. `path`: the right ones of a tree."""
        self.filled += 0.05 * (num_drafted / asked - self.filled)
        if not num_drafted:
            return
        self._is_tree = self._is_tree or path is not None
        judged = num_drafted if self._is_tree else min(num_accepted + 1, num_drafted)
        right = range(num_accepted) if path is None else path
        for place in range(judged):
            self._judged[place] = FORGET * self._judged[place] + 1
            self._right[place] = FORGET * self._right[place] + (place in right)
        record = self._records.get(request_id)
        if record is None:
            record = self._records[request_id] = _Record(step)
        record.fade(step)
        if self._is_tree:  # a step is one look at the request
            record.judged = FORGET_REQUEST * record.judged + 1
            record.right = FORGET_REQUEST * record.right + num_accepted / num_drafted
            return
        for place in range(judged):
            record.judged = FORGET_REQUEST * record.judged + 1
            record.right = FORGET_REQUEST * record.right + (place < num_accepted)

    def by_place(self) -> list[float]:
        """Return the chances of all requests, one for each place."""
        found = []
        chance, weight = PRIOR, PRIOR_WEIGHT
        if self._is_tree:
            share = 1.0
            for judged, right in zip(self._judged, self._right, strict=True):
                now = min(share, (right + weight * chance) / (judged + weight))
                found.append(now / share)
                share, chance, weight = max(now, LEAST_SHARE), PRIOR * now, PLACE_WEIGHT
            return found
        for judged, right in zip(self._judged, self._right, strict=True):
            chance = (right + weight * chance) / (judged + weight)
            found.append(chance)
            weight = PLACE_WEIGHT
        return found

    def scales(self, request_ids: Sequence[int], step: int) -> list[float]:
        """Return for each request the factor of the common chances; a product counts up to `SUREST`."""
        mean = (sum(self._right) + PRIOR_WEIGHT * PRIOR) / (sum(self._judged) + PRIOR_WEIGHT)
        found = []
        for request in request_ids:
            record = self._records.get(request)
            if record is None:
                found.append(1.0)
                continue
            record.fade(step)
            found.append((record.right + LEND * mean) / (record.judged + LEND) / mean)
        return found

    def last_judged(self, request_id: int) -> int:
        """The step of the latest guess; -1: there was none."""
        record = self._records.get(request_id)
        return -1 if record is None else record.step

    def doubt(self) -> None:
        """It is a while ago: what is known counts little beside what comes now."""
        for place, judged in enumerate(self._judged):
            if judged > OLD_WEIGHT:
                self._judged[place] = OLD_WEIGHT
                self._right[place] *= OLD_WEIGHT / judged

    def forget(self, request_id: int) -> None:
        self._records.pop(request_id, None)

    def report(self) -> dict[str, Any]:
        return {"by_place": self.by_place(), "filled": self.filled, "requests": len(self._records)}
