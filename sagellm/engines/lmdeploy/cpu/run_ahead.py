"""The next decode step of an agent, computed while the engine still decides what comes next."""

from collections.abc import Callable

from sagellm.engines.lmdeploy.cpu.compiled import CpuRunner
from sagellm.engines.lmdeploy.cpu.operators.sampling import Sampled
from sagellm.engines.lmdeploy.cpu.ready_step import ReadyStep

__all__ = ["RunAhead"]

FEWEST_RIGHT, MOST_RIGHT = 2, 64


class RunAhead:
    """The step after a round of an agent, computed while the engine still decides what comes next.

    The forecast is: the same sequences go on with the tokens that they have just got. The engine's own choice is compared with
    it: tokens, blocks, lengths, and how tokens are drawn. If both are the same, the result is there already. Otherwise it is
    dropped, and nothing has to be undone. The step has written the keys and values of one token to a slot that was allocated
    for this token, and the owner of a slot writes it before it reads it.

    A wrong forecast costs the time of a step. So a step runs ahead only after some right forecasts in a row, and after twice as
    many once one was wrong. None runs while a prompt waits.

    Args:
        is_prompt_waiting: whether the engine has requests that wait for their first step.
    """

    def __init__(self, is_prompt_waiting: Callable[[], bool]) -> None:
        self.used = self.wasted = 0  # steps that ran ahead
        self._is_prompt_waiting = is_prompt_waiting
        self._expected: ReadyStep | None = None
        self._drawn: list[Sampled] | None = None
        self._num_right, self._needed = 0, FEWEST_RIGHT

    @property
    def is_due(self) -> bool:
        """Whether the next step may run ahead."""
        return self._num_right >= self._needed and not self._is_prompt_waiting()

    def expect(self, step: ReadyStep) -> None:
        """Take the step that will probably come next."""
        self._expected = step

    def run(self, runner: CpuRunner, begin: Callable[[], None]) -> None:
        """Run the expected step."""
        self._drawn = runner.run(self._expected, begin)

    def take(self, step: ReadyStep, block_size: int) -> list[Sampled] | None:
        """Return the tokens of the step that the engine asks for, if it has run ahead."""
        return self._settle(self._expected is not None and step.is_same_as(self._expected, block_size))

    def forget(self) -> None:
        """The engine asks for a step of another kind."""
        self._settle(False)

    def _settle(self, is_right: bool) -> list[Sampled] | None:
        drawn, self._expected, self._drawn = self._drawn, None, None
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
