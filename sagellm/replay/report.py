"""Results of a replay, as a JSON document or as tables on a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from time import monotonic
from typing import TYPE_CHECKING, Any

from sagellm.replay.base import Trace
from sagellm.replay.run import Row
from sagellm.replay.session import Report

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from sagellm.replay.reads import Reads

QUIET_S = 2.0
COLUMNS = {
    "policy": lambda row: row.policy,
    "capacity": lambda row: f"{row.capacity:,}",
    "hit rate block": lambda row: f"{row.hit_rate_block:.4f}",
    "token": lambda row: f"{row.hit_rate_token:.4f}",
    "with retries": lambda row: f"{row.hit_rate_block_with_retries:.4f}" if row.retries else "",
    "regret": lambda row: "" if row.regret_block is None else f"{row.regret_block:.4f}",
    "evictions": lambda row: f"{row.evictions:,}",
    "back soon": lambda row: "" if row.evictions_soon_share is None else f"{row.evictions_soon_share:.4f}",
    "from cpu": lambda row: f"{row.loaded_blocks['cpu']:,}" if row.loaded_blocks else "",
    "from nvme": lambda row: f"{row.loaded_blocks['nvme']:,}" if row.loaded_blocks and "nvme" in row.tiers else "",
    "moved MB": lambda row: f"{row.migration_bytes / 1e6:,.0f}" if row.migration_bytes else "",
    "TTFT mean": lambda row: f"{row.ttft_mean_s:.4f}",
    "p99": lambda row: f"{row.ttft_p99_s:.4f}",
    "oversized": lambda row: f"{row.oversized:,}" if row.oversized else "",
    "run s": lambda row: f"{row.seconds:.3f}",
}


def document(trace: Trace, rows: Sequence[Row], **more: Any) -> dict[str, Any]:
    """Plain values for JSON, rates in full."""
    about = {
        "name": trace.name, "sha256": trace.sha256, "requests": trace.num_requests, "accesses": trace.num_accesses,
        "distinct_blocks": trace.num_distinct_blocks, "block_size": trace.block_size, "skipped": trace.num_skipped,
    }  # fmt: skip
    return {"trace": about, **more, "rows": [asdict(row) for row in rows]}


def caption(trace: Trace, rows: Sequence[Row]) -> str:
    """One line about the trace and how it was replayed."""
    skipped = f", {trace.num_skipped:,} lines skipped" if trace.num_skipped else ""
    tiers = rows[0].tiers or {}
    where = f", {', '.join(f'{tier} {blocks:,}' for tier, blocks in tiers.items())}" if tiers else ""
    return (
        f"{trace.name}: {trace.num_requests:,} requests, {trace.num_accesses:,} blocks of {trace.block_size} tokens, "
        f"{trace.num_distinct_blocks:,} distinct{skipped}; {rows[0].semantics} semantics{where}"
    )


def table(rows: Sequence[Row]) -> Table:
    """A rich table that fits 80 characters in the common case; columns that are empty in every row are left out."""
    from rich.table import Table

    found = Table(box=None, padding=(0, 1, 0, 0))
    cells = {name: [_cell(name, row) for row in rows] for name in COLUMNS}
    shown = [name for name, texts in cells.items() if any(texts)]
    for name in shown:
        # Broken here, since rich breaks values as readily as headers where width is scarce.
        header = name.replace(" ", "\n")
        found.add_column(header, justify="left" if name == "policy" else "right", no_wrap=True, vertical="bottom")
    for number in range(len(rows)):
        found.add_row(*(cells[name][number] for name in shown))
    return found


READS = {
    "policy": lambda row: row.policy,
    "decode read": lambda row: f"{row.decode_read:,}",
    "of": lambda row: f"{row.decode_held:,}",
    "share": lambda row: f"{row.decode_read / max(1, row.decode_held):.3f}",
    "prompts share": lambda row: f"{row.prompt_read / max(1, row.prompt_held):.3f}",
    "saved GB": lambda row: f"{row.saved_bytes / 1e9:.3f}",
    "steps s": lambda row: f"{row.seconds:.2f}",
    "dense s": lambda row: f"{row.dense_seconds:.2f}",
}


def reads_table(rows: Sequence[Reads]) -> Table:
    """Return blocks that sparse policies would have read, what that saves, and the time of all steps by the fitted model."""
    from rich.table import Table

    found = Table(box=None, padding=(0, 1, 0, 0))
    for name in READS:
        header = name.replace(" ", "\n")
        found.add_column(header, justify="left" if name == "policy" else "right", no_wrap=True, vertical="bottom")
    for row in rows:
        found.add_row(*(cell(row) for cell in READS.values()))
    return found


def _cell(name: str, row: Row) -> str:
    return "" if row.error and name not in ("policy", "capacity") else COLUMNS[name](row)


def errors(rows: Sequence[Row]) -> list[str]:
    """A line for each row without figures."""
    return [f"{row.policy} at {row.capacity:,}: {row.error}" for row in rows if row.error]


def min_width(table: Table, console: Console) -> int:
    """Characters that the table needs for whole values."""
    from rich.measure import Measurement

    return Measurement.get(console, console.options.update(max_width=10_000), table).maximum


@contextmanager
def progress_bar() -> Iterator[Report | None]:
    """A function to report to, which draws once two seconds have passed; None where standard error is no terminal."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    bar = Progress(console=console, transient=True)
    start_s = monotonic()
    task = bar.add_task("replay", total=1.0)
    is_shown = False

    def report(what: str, part: float) -> None:
        nonlocal is_shown
        if not is_shown and monotonic() - start_s > QUIET_S:
            bar.start()
            is_shown = True
        if is_shown:
            bar.update(task, description=what, completed=part)

    try:
        yield report
    finally:
        if is_shown:
            bar.stop()
