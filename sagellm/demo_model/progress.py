"""The progress bar of the training, on standard error; nothing at all when that is not a terminal."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def training_progress(steps: int, quiet: bool) -> Iterator[Callable[[int, float], None]]:
    """A function to call with (steps done, loss) after each step."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=quiet or not console.is_terminal) as progress:
        task = progress.add_task("Training the demo model (once)", total=steps, loss="")

        def tick(done: int, loss: float) -> None:
            progress.update(task, completed=done, loss=f"loss {loss:.2f}")

        yield tick
