"""A picture of an answer over time: when the plan and each point were written."""

import time
from collections.abc import Sequence
from pathlib import Path

from sagellm.accel.sot.results import Listener, TaskData
from sagellm.core.figure import new_figure, save_figure

__all__ = ["Timeline", "draw"]

WIDTH, ROW, MARGIN = 9.0, 0.34, 1.1  # inches


class Timeline(Listener):
    """Keeps when tokens came.

    Attributes:
        start_s: when it was made, the origin of the picture.
        planned_s: when the plan was read.
        token_s: times of each branch's tokens, in seconds of `time.perf_counter`.
    """

    def __init__(self) -> None:
        self.start_s = self.planned_s = time.perf_counter()
        self.tasks: tuple[TaskData, ...] = ()
        self.token_s: dict[int, list[float]] = {}

    def planned(self, tasks: Sequence[TaskData]) -> None:
        self.tasks, self.planned_s = tuple(tasks), time.perf_counter()

    def token(self, branch_id: int, token: int) -> None:
        self.token_s.setdefault(branch_id, []).append(time.perf_counter())


def draw(timeline: Timeline, title: str, path: Path) -> None:
    """Draw a bar for the plan and for each point, with a tick for each token.

    Args:
        path: of a `.png`, `.svg` or `.pdf` file.

    Raises:
        ConfigError: matplotlib is not installed, it does not know the kind of file, or the file cannot be written.
    """
    names = {task.branch_id: f"{task.branch_id + 1}. {task.title}" for task in timeline.tasks} or {0: "answer"}
    figure = new_figure(WIDTH, MARGIN + ROW * (len(names) + 1))
    axes = figure.add_subplot()
    axes.barh(0, timeline.planned_s - timeline.start_s, color="#9aa5b1", height=0.7)
    for row, (branch_id, _) in enumerate(names.items(), 1):
        times = [each - timeline.start_s for each in timeline.token_s.get(branch_id, ())]
        if times:
            begin = timeline.planned_s - timeline.start_s
            axes.barh(row, times[-1] - begin, left=begin, color="#bcd7f0", height=0.7)
            axes.vlines(times, row - 0.35, row + 0.35, color="#1f6fb2", linewidth=0.6)
            axes.annotate(f" {len(times)} tokens", (times[-1], row), va="center", fontsize=8)
    axes.set_yticks(range(len(names) + 1), ["plan", *names.values()])
    axes.invert_yaxis()
    axes.set_xlabel("seconds")
    axes.set_title(title, fontsize=10)
    axes.margins(x=0.12)
    axes.set_xlim(left=0)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    save_figure(figure, path)
