"""A picture of a profile: time between tokens and throughput over KV in use."""

from pathlib import Path

from sagellm.control_plane.sla.profile import SLAProfile, name_of
from sagellm.core.figure import new_figure, save_figure

__all__ = ["draw"]

PANEL = (4.6, 3.2)  # inches


def draw(profile: SLAProfile, title: str, path: Path) -> None:
    """Draw a row of two panels for each setup, with a line for each number of requests.

    Args:
        path: of a `.png`, `.svg` or `.pdf` file.

    Raises:
        ConfigError: matplotlib is not installed, it does not know the kind of file, or the file cannot be written.
    """
    rows = len(profile.setups)
    figure = new_figure(2 * PANEL[0], rows * PANEL[1])
    panels = figure.subplots(rows, 2, squeeze=False)
    for (latency, speed), setup in zip(panels, profile.setups, strict=True):
        points = profile.of(setup)
        for concurrency in sorted({each.concurrency for each in points}):
            line = sorted((each for each in points if each.concurrency == concurrency), key=lambda each: each.kv_tokens)
            kv_tokens = [each.kv_tokens for each in line]
            latency.plot(kv_tokens, [1e3 * each.step_s for each in line], marker="o", label=f"{concurrency} requests")
            speed.plot(kv_tokens, [each.steps_per_s for each in line], marker="o")
        unit = "steps" if setup[1] else "tokens"
        for axes, text in ((latency, f"ms between {unit}"), (speed, f"{unit}/s of all requests")):
            axes.set_xscale("log")
            axes.set_ylim(bottom=0)
            axes.set_xlabel("tokens in KV blocks")
            axes.set_ylabel(text)
            axes.set_title(name_of(setup), fontsize=9)
            for side in ("top", "right"):
                axes.spines[side].set_visible(False)
        latency.legend(fontsize=8, frameon=False)
    figure.suptitle(title, fontsize=10)
    save_figure(figure, path)
