"""Sums that engines count since their start: by how much they have grown."""

from collections.abc import Mapping

__all__ = ["Growth"]


class Growth:
    """Compares the sums of engines with those of the last call. A process that was started again began at 0.

    Args:
        kept: sums that go on where an engine starts again, since others count them.
    """

    def __init__(self, kept: tuple[str, ...] = ()) -> None:
        self._kept = kept
        self._known: dict[str, dict[str, float]] = {}

    def more(self, totals: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
        """Return by how much each sum of all engines together has grown.

        Args:
            totals: name of an engine -> its sums. `ended` tells whether it was started again.
        """
        more: dict[str, float] = {}
        for engine, now in totals.items():
            known = self._known.get(engine, {})
            if now.get("ended", 0.0) < known.get("ended", 0.0):
                known = {name: known[name] for name in self._kept}
            for name, value in now.items():
                more[name] = more.get(name, 0.0) + value - known.get(name, 0.0)
        self._known = {engine: dict(now) for engine, now in totals.items()}
        return more
