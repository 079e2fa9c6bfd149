"""The result of `benchmarks.prefix_peers` as Markdown."""

from typing import Any

from benchmarks.contestants import paired_ratio, summary
from benchmarks.output import measured_on

OURS = "sagellm"
FIGURES = (
    ("ns_per_matched_token", "ns a matched token"),
    ("insert_ns_per_token", "insert, ns a token"),
    ("bytes_per_token", "bytes a cached token"),
    ("evict_ns_per_block", "evict, ns a block"),
)


def summarise(figures: dict[str, Any]) -> dict[str, Any]:
    """Median and quartiles of each figure of each contestant, and of its ratio to ours, round by round.

    `rounds` has the values themselves. `times_ours` has the contestant's figure over ours, for lookups by part, each against
    our whole lookup.
    """
    ours = figures.get(OURS, {})
    out: dict[str, Any] = {}
    for name, own in figures.items():
        out[name] = {"about": own["about"], "refused": own["refused"], "times_ours": {}, "rounds": {}}
        for figure, values in own.items():
            if figure in ("about", "refused"):
                continue
            out[name]["rounds"][figure] = values
            by_part = isinstance(values, dict)
            out[name][figure] = {part: summary(row) for part, row in values.items()} if by_part else summary(values)
            if figure not in ours or figure == "own_bytes_per_token":
                continue
            if by_part:
                whole = ours[figure]["lookup"]
                out[name]["times_ours"][figure] = {part: paired_ratio(row, whole) for part, row in values.items()}
            else:
                out[name]["times_ours"][figure] = paired_ratio(values, ours[figure])
    return out


def markdown(result: dict[str, Any]) -> str:
    options = result["options"]
    lines = [
        "# The prefix index and its peers",
        "",
        f"{measured_on(result)}, {options['starts']} starts of {options['rounds']} rounds.",
        "",
        f"{options['num_sequences']:,} sequences inserted, {options['num_lookups']:,} lookups; what is in them is told in "
        "`benchmarks/prefix/workload.py`. A contestant's turn is two passes over all lookups; the first finds the processor's "
        "caches as the contestant before left them and has a column of its own. CPU time, median of the rounds with quartiles "
        "in brackets; *times ours* and figures after an x are medians of the ratios of each round.",
        "",
    ]
    for block_size, contestants in result["peers"].items():
        lines += _peers(block_size, contestants)
    lines += _notes(result["peers"])
    lines += _own(result)
    return "\n".join(lines)


def _peers(block_size: str, contestants: dict[str, Any]) -> list[str]:
    heads = ["", "us a lookup", "times ours", "first pass, us", *(title for _, title in FIGURES)]
    lines = [f"## Blocks of {block_size} tokens", "", f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for name, own in contestants.items():
        if own["refused"]:
            lines.append(f"| {name} | refused: {own['refused']} |" + " |" * (len(heads) - 2))
            continue
        for place, (part, spread) in enumerate(own["lookup_us"].items()):
            times = own["times_ours"].get("lookup_us", {}).get(part)
            cells = [name if place == 0 else f"- {part}", _spread(spread), _times(times), _first_pass(own, part)]
            cells += [_figure(own, figure) if place == 0 else "" for figure, _ in FIGURES]
            lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


def _notes(peers: dict[str, Any]) -> list[str]:
    about = {name: own["about"] for contestants in peers.values() for name, own in contestants.items()}
    return [f"- {name} {row['version']} (Python {row['python']}): {row['note']}." for name, row in about.items()] + [""]


def _own(result: dict[str, Any]) -> list[str]:
    lines = ["## The index alone", "", "| figure | median | quartiles |", "|---|---|---|"]
    for name, spread in result["alone"].items():
        lines.append(
            f"| {name} | {_number(spread['median'])} | {_number(spread['low'])} to {_number(spread['high'])} |"
        )
    return [*lines, ""]


def _figure(own: dict[str, Any], figure: str) -> str:
    if figure not in own:
        return "-"
    return _number(own[figure]["median"]) + _behind(own["times_ours"].get(figure))


def _first_pass(own: dict[str, Any], part: str) -> str:
    times = own["times_ours"].get("first_pass_us", {}).get(part)
    return _number(own["first_pass_us"][part]["median"]) + _behind(times)


def _spread(spread: dict[str, float]) -> str:
    return f"{_number(spread['median'])} [{_number(spread['low'])}, {_number(spread['high'])}]"


def _behind(times: dict[str, float] | None) -> str:
    return f" ({_number(times['median'])}x)" if times and _times(times) != "1" else ""


def _times(spread: dict[str, float] | None) -> str:
    if spread is None:
        return "-"
    return "1" if spread["low"] == spread["high"] == 1 else _spread(spread)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
