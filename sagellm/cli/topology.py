"""`sagellm topology`: the NUMA nodes, GPUs, NICs and NVMe of this machine, how far they are apart, and what a copy costs."""

import json
from pathlib import Path

import click

from sagellm.cli.values import answering

MAX_BYTES = 1 << 50


@click.command()
@click.option("--measure", is_flag=True, help="Time copies within and between NUMA nodes, and TCP on loopback.")
@click.option(
    "--num-bytes", type=click.IntRange(0, MAX_BYTES), default=1 << 20, show_default=True, help="That the cost matrix is for."
)
@click.option("--draw", type=click.Path(dir_okay=False, path_type=Path), help="Picture to write, .svg or .png.")
@click.option("--from", "source", type=click.Path(path_type=Path), help="JSON of another machine, or of an earlier look.")
@click.option("--sysfs", type=click.Path(path_type=Path), default="/sys", show_default=True, help="Tree to look at.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document, which --from takes.")
def topology(measure: bool, num_bytes: int, draw: Path | None, source: Path | None, sysfs: Path, as_json: bool) -> None:
    """Print and draw how the devices of this machine are connected, and what a transfer between any two costs.

    Exit code 0: done; 1: it cannot be looked at, measured or drawn; 2: misuse.
    """
    from sagellm.comm_backend.topology import TopologyManager
    from sagellm.comm_backend.topology.base import TopologyInfo
    from sagellm.comm_backend.topology.figure import write_figure

    with answering(as_json):
        manager = TopologyManager(sysfs, info=None if source is None else TopologyInfo.read(source))
        info = manager.measure() if measure else manager.info
        if draw is not None:
            write_figure(info, manager.links(), draw)
    if as_json:
        click.echo(json.dumps(_document(manager, num_bytes), indent=1))
        return
    _show(manager, num_bytes)
    if draw is not None:
        click.echo(f"wrote {draw}")


def _document(manager, num_bytes: int) -> dict:
    return {
        "topology": manager.info.model_dump(mode="json"),
        "devices": manager.info.device_names,
        "links": [link.model_dump(mode="json") for link in manager.links()],
        "num_bytes": num_bytes,
        "seconds": manager.cost_matrix(num_bytes),
    }


def _show(manager, num_bytes: int) -> None:
    from sagellm.cli.tables import show_rows
    from sagellm.comm_backend.topology.draw import describe, rate_text, text_tree

    info = manager.info
    click.echo(text_tree(info) + "\n")
    columns = {"device": "name", "what": "what", "NUMA": "numa", "PCI": "address", "speed": "speed"}
    show_rows(describe(info), columns, False)
    names = info.device_names
    texts = {}
    for link in manager.links():
        texts[link.a, link.b] = texts[link.b, link.a] = link.text
    click.echo(f"\nHow far apart, as nvidia-smi topo names it ({_legend(set(texts.values()))}):")
    _matrix(names, [[texts[a, b] for b in names] for a in names])
    click.echo(f"\nMicroseconds for {num_bytes} bytes:")
    _matrix(names, [[f"{1e6 * seconds:.4g}" for seconds in row] for row in manager.cost_matrix(num_bytes)])
    for each in info.measurements:
        latency = "" if each.latency_s is None else f", latency {1e6 * each.latency_s:.3g} us"
        click.echo(f"measured {each.a} -> {each.b}: {rate_text(each.bytes_per_s)} with {each.num_bytes} bytes{latency}")
    for note in info.notes:
        click.echo(f"note: {note}")


def _matrix(names: tuple[str, ...], rows: list[list[str]]) -> None:
    """As wide as it must be; a terminal may wrap it, which keeps every number."""
    widths = [max(len(text) for text in column) for column in zip(names, *rows, strict=True)] if names else []
    first = max(map(len, names), default=0)
    for name, row in (("", names), *zip(names, rows, strict=True)):
        cells = [name.ljust(first), *(text.rjust(width) for text, width in zip(row, widths, strict=True))]
        click.echo("  ".join(cells).rstrip())


def _legend(seen: set[str]) -> str:
    texts = {
        "X": "X itself",
        "PIX": "PIX one PCIe bridge",
        "PXB": "PXB several",
        "PHB": "PHB a host bridge",
        "NODE": "NODE several of a node or socket",
        "SYS": "SYS between sockets",
        "NET": "NET a network",
    }
    nvlink = ["NV# NVLinks"] if any(text.startswith("NV") for text in seen) else []
    return ", ".join([*nvlink, *(text for name, text in texts.items() if name in seen)])
