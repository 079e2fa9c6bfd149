"""How likely a guess is right: by place, and by request."""

from typing import Any

import numpy as np

__all__ = ["Acceptance"]

FORGET = 0.99  # of what all requests tell, with each guess that was judged
FORGET_REQUEST = 0.92
FADE = 0.97  # of what a request tells, with each step that goes by: one that failed is tried again
OLD_WEIGHT = 4.0  # guesses that count as much as all that is known from before a pause
PRIOR, PRIOR_WEIGHT, PLACE_WEIGHT = 0.7, 2.0, 8.0  # the last: of the place before
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
    """The chance of each place, given that all guesses before it were right. A place that nobody has come to is like the one
    before it; a request of which nothing is known is like all others.

    Args:
        lookahead: places.
    """

    def __init__(self, lookahead: int) -> None:
        self._judged = np.zeros(lookahead)
        self._right = np.zeros(lookahead)
        self._records: dict[int, _Record] = {}
        self.filled = 1.0  # guesses that come, of those that are asked for

    def add(self, request_id: int, asked: int, num_drafted: int, num_accepted: int, step: int) -> None:
        """A step, by its number, in which `asked` guesses of a request were wanted, 1 or more."""
        self.filled += 0.05 * (num_drafted / asked - self.filled)
        if not num_drafted:
            return
        judged = min(num_accepted + 1, num_drafted)
        self._judged[:judged] *= FORGET
        self._right[:judged] *= FORGET
        self._judged[:judged] += 1
        self._right[:num_accepted] += 1
        record = self._records.get(request_id)
        if record is None:
            record = self._records[request_id] = _Record(step)
        record.fade(step)
        for place in range(judged):
            record.judged = FORGET_REQUEST * record.judged + 1
            record.right = FORGET_REQUEST * record.right + (place < num_accepted)

    def by_place(self) -> np.ndarray:
        """float64 [lookahead], of all requests."""
        found = np.empty(len(self._judged))
        chance, weight = PRIOR, PRIOR_WEIGHT
        for place, (judged, right) in enumerate(zip(self._judged.tolist(), self._right.tolist(), strict=True)):
            found[place] = chance = (right + weight * chance) / (judged + weight)
            weight = PLACE_WEIGHT
        return found

    def of(self, request_ids: list[int], step: int) -> np.ndarray:
        """float64 [requests, lookahead]."""
        common = self.by_place()
        judged, right = self._judged.sum(), self._right.sum()
        mean = (right + PRIOR_WEIGHT * PRIOR) / (judged + PRIOR_WEIGHT)
        scale = np.ones(len(request_ids))
        for number, request in enumerate(request_ids):
            record = self._records.get(request)
            if record is not None:
                record.fade(step)
                scale[number] = (record.right + LEND * mean) / (record.judged + LEND) / mean
        return np.minimum(common[None, :] * scale[:, None], 0.999)

    def last_judged(self, request_id: int) -> int:
        """The step of the latest guess; -1: there was none."""
        record = self._records.get(request_id)
        return -1 if record is None else record.step

    def doubt(self) -> None:
        """It is a while ago: what is known counts little beside what comes now."""
        share = np.minimum(1.0, OLD_WEIGHT / np.maximum(self._judged, 1e-9))
        self._judged *= share
        self._right *= share

    def forget(self, request_id: int) -> None:
        self._records.pop(request_id, None)

    def report(self) -> dict[str, Any]:
        return {"by_place": self.by_place().tolist(), "filled": self.filled, "requests": len(self._records)}
