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
        self._last: tuple[ReadyStep, list[Sampled]] | None = None  # the step before, and its tokens
        self._is_ready = False  # the step has become the expected one
        self._drawn: list[Sampled] | None = None  # tokens of the expected one, if it has run
        self._num_right, self._needed = 0, FEWEST_RIGHT

    @property
    def is_due(self) -> bool:
        """Whether the next step may run ahead."""
        return self._num_right >= self._needed and not self._is_prompt_waiting()

    def expect(self, step: ReadyStep, drawn: list[Sampled]) -> None:
        """Expect the step that follows `step`, which has drawn these tokens. `step` may be changed from now on."""
        self._last, self._is_ready = (step, drawn), False

    def prepare(self, runner: CpuRunner) -> None:
        """Make the expected step ready to `run`."""
        runner.follow(*self._last)
        self._is_ready = True

    def run(self, runner: CpuRunner, hand_over: Callable[[], None]) -> None:
        """Run the expected step."""
        self._drawn = runner.run(self._last[0], hand_over)

    def take(self, runner: CpuRunner, step: ReadyStep, block_size: int) -> list[Sampled] | None:
        """Return the tokens of the step that the engine asks for, if it has run ahead."""
        if self._last is None:
            return self._settle(False)
        expected, drawn = self._last
        if not self._is_ready:
            if step.tokens.flatten().tolist() != [token for token, _, _ in drawn]:  # the usual reason
                return self._settle(False)
            runner.follow(expected, drawn)
        return self._settle(step.is_same_as(expected, block_size))

    def forget(self) -> None:
        """The engine asks for a step of another kind."""
        self._settle(False)

    def _settle(self, is_right: bool) -> list[Sampled] | None:
        drawn, self._last, self._drawn = self._drawn, None, None
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
