"""A machine as a picture: a column a NUMA node, boxes for its devices, lines for NVLinks and between nodes."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sagellm.comm_backend.topology.base import Link, LinkKind, TopologyInfo
from sagellm.comm_backend.topology.draw import rate_text, size_text
from sagellm.core.errors import CommError
from sagellm.core.figure import new_figure, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["SUFFIXES", "write_figure"]

SUFFIXES = (".svg", ".png")
# Okabe and Ito's palette, which colour-blind readers can tell apart.
COLOURS = {"numa": "#F0E442", "gpu": "#009E73", "nic": "#56B4E9", "nvme": "#CC79A7"}
NVLINK, NUMA = "#009E73", "#D55E00"
WIDTH, HEIGHT, GAP, ASIDE = 2.2, 0.55, 0.25, 1.2
Place = tuple[float, float]  # the middle of the left edge of a box


def write_figure(info: TopologyInfo, links: Sequence[Link], path: Path) -> None:
    """SVG or PNG, by the name.

    Raises:
        CommError: another suffix; matplotlib is not installed; the file cannot be written.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise CommError(f"cannot draw {path.name}; give a name that ends in {' or '.join(SUFFIXES)}.")
    columns = _columns(info)
    rows = max((len(boxes) for _, boxes in columns), default=1)
    figure = new_figure(max(4.0, len(columns) * (WIDTH + ASIDE)), max(2.5, rows * (HEIGHT + GAP) + 1), CommError)
    axes = figure.subplots()
    axes.set_axis_off()
    axes.set_title(info.host or "machine", parse_math=False)
    places = _boxes(axes, columns)
    _lines(axes, links, places)
    axes.autoscale_view()
    save_figure(figure, path, CommError)


def _columns(info: TopologyInfo) -> list[tuple[int | None, list[tuple[str, str, str]]]]:
    """NUMA node -> boxes: kind, name, text."""
    nodes = [node.index for node in info.numa_nodes]
    columns: dict[int | None, list[tuple[str, str, str]]] = {}
    for node in info.numa_nodes:
        text = f"{node.name}\n{len(node.cpus)} CPUs, {size_text(node.memory_bytes)}"
        columns[node.index] = [("numa", node.name, text)]
    devices = [
        *(("gpu", gpu.label, f"{gpu.label}\n{gpu.name[:28]}", gpu.numa_node) for gpu in info.gpus),
        *(("nic", nic.name, f"{nic.name}\n{_speed(nic.bits_per_s)}", nic.numa_node) for nic in info.own_nics),
        *(("nvme", nvme.name, nvme.name, nvme.numa_node) for nvme in info.nvmes),
    ]
    for kind, name, text, node in devices:
        place = node if node in nodes else nodes[0] if len(nodes) == 1 else None
        columns.setdefault(place, []).append((kind, name, text))
    return list(columns.items())


def _boxes(axes: "Axes", columns: list[tuple[int | None, list[tuple[str, str, str]]]]) -> dict[str, Place]:
    from matplotlib.patches import FancyBboxPatch

    places = {}
    for number, (_, boxes) in enumerate(columns):
        for row, (kind, name, text) in enumerate(boxes):
            x, y = number * (WIDTH + ASIDE), -row * (HEIGHT + GAP)
            style = {"boxstyle": "round,pad=0.04", "facecolor": COLOURS[kind], "edgecolor": "black", "zorder": 2}
            axes.add_patch(FancyBboxPatch((x, y), WIDTH, HEIGHT, **style))
            # parse_math: a dollar in a device's name is no formula
            axes.text(x + WIDTH / 2, y + HEIGHT / 2, text, ha="center", va="center", fontsize=7, zorder=3, parse_math=False)
            places[name] = (x, y + HEIGHT / 2)
    return places


def _lines(axes: "Axes", links: Sequence[Link], places: dict[str, Place]) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import FancyArrowPatch

    known: dict[str, FancyArrowPatch] = {}
    for link in links:
        if link.kind not in (LinkKind.NVLINK, LinkKind.NUMA) or link.a not in places or link.b not in places:
            continue
        (x, y), (u, v) = sorted((places[link.a], places[link.b]), key=lambda place: (place[0], -place[1]))
        is_column = x == u  # then the line leaves and enters on the right, and goes round what is between
        ends = ((x + WIDTH, y), (u + WIDTH if is_column else u, v))
        text = f"{link.text}, {rate_text(link.bytes_per_s)}"
        colour, width = (NVLINK, 1.0) if link.kind is LinkKind.NVLINK else (NUMA, 2.0)
        bend = -0.4 if is_column else 0.0
        shape = {"arrowstyle": "-", "connectionstyle": f"arc3,rad={bend}"}
        known[text] = FancyArrowPatch(*ends, **shape, color=colour, lw=width, zorder=1)
        axes.add_patch(known[text])
    if known:
        handles = [Line2D([], [], color=line.get_edgecolor(), label=text) for text, line in sorted(known.items())]
        axes.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, 0.0), ncols=3, fontsize=7, frameon=False)


def _speed(bits_per_s: float | None) -> str:
    return f"{bits_per_s / 1e9:g} Gbit/s" if bits_per_s else "speed not known"
