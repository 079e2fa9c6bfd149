"""Figures of matplotlib, which is loaded on first use and need not be installed."""

from pathlib import Path
from typing import TYPE_CHECKING

from sagellm.core.errors import ConfigError, SageError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["COLOURS", "new_figure", "save_figure"]

# Okabe and Ito's palette, which colour-blind readers can tell apart.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
DOTS = 120  # per inch


def new_figure(width: float, height: float, error: type[SageError] = ConfigError) -> "Figure":
    """Make an empty figure.

    Args:
        width: in inches, as is `height`.
        error: class of the error to raise.

    Raises:
        SageError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure  # not pyplot: no global state, and no display
    except ImportError:
        raise error("a plot needs matplotlib, which is not installed: pip install matplotlib") from None
    return Figure(figsize=(width, height), layout="constrained")


def save_figure(figure: "Figure", path: Path, error: type[SageError] = ConfigError, make_folder: bool = False) -> Path:
    """Write a figure into a file, and return its path.

    Args:
        path: of a `.png`, `.svg` or `.pdf` file.
        error: class of the error to raise.
        make_folder: whether to make its folder if need be.

    Raises:
        SageError: matplotlib does not know the kind of file, or the file cannot be written.
    """
    try:
        if make_folder:
            path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=DOTS)
    except (OSError, ValueError) as cause:
        raise error(f"cannot write {path}: {cause}. Use a .png, .svg or .pdf file in a folder that you may write.") from None
    return path
