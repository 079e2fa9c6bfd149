"""The next decode step of an agent, computed while the engine still decides what comes next."""

from collections.abc import Callable

from sagellm.engines.lmdeploy.cpu.compiled import CpuRunner, Step
from sagellm.engines.lmdeploy.cpu.operators.sampling import Sampled

__all__ = ["RunAhead"]

FEWEST_RIGHT, MOST_RIGHT = 2, 64


class RunAhead:
    """The step after a round of an agent, computed while the engine still decides what comes next.

    It is the same sequences with the tokens that they have just got. What the engine asks for is compared with it: tokens,
    blocks, lengths, and how tokens are drawn. If it is the same, the result is there already. Otherwise the result is dropped.
    That is harmless. The step has written the keys and values of one token, to a slot that was allocated for this token, and a
    slot is read only after it was written for its owner.

    A wrong step takes time, so a step runs ahead only after some right forecasts in a row, twice as many after each wrong step.
    None runs while a prompt waits.

    Args:
        is_prompt_waiting: whether the engine has requests that wait for their first step.
    """

    def __init__(self, is_prompt_waiting: Callable[[], bool]) -> None:
        self.used = self.wasted = 0  # steps that ran ahead
        self._is_prompt_waiting = is_prompt_waiting
        self._expected: Step | None = None
        self._drawn: list[Sampled] | None = None
        self._num_right, self._needed = 0, FEWEST_RIGHT

    @property
    def is_due(self) -> bool:
        """Whether the next step may run ahead."""
        return self._num_right >= self._needed and not self._is_prompt_waiting()

    def expect(self, step: Step) -> None:
        """Take the step that will probably come next."""
        self._expected = step

    def run(self, runner: CpuRunner, begin: Callable[[], None]) -> None:
        """Run the expected step."""
        self._drawn = runner.run(self._expected, begin)

    def take(self, step: Step, block_size: int) -> list[Sampled] | None:
        """Return the tokens of the step that the engine asks for, if it has run ahead."""
        expected, drawn = self._expected, self._drawn
        self._expected = self._drawn = None
        is_right = expected is not None and step.is_same_as(expected, block_size)
        self._num_right = self._num_right + 1 if is_right else 0
        if drawn is None:
            return None
        if is_right:
            self.used += 1
            self._needed = max(FEWEST_RIGHT, self._needed // 2)
            return drawn
        self.wasted += 1
        self._needed = min(MOST_RIGHT, 2 * self._needed)
        return None

    def forget(self) -> None:
        """The engine asks for a step of another kind."""
        self.wasted += self._drawn is not None
        self._expected = self._drawn = None
        self._num_right = 0
