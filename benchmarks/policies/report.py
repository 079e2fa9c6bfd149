"""The result of `benchmarks.policy_peers` as Markdown."""

from typing import Any

from benchmarks.output import measured_on

OURS, PEER = "sagellm", "libCacheSim"


def markdown(result: dict[str, Any]) -> str:
    options = result["options"]
    lines = [
        "# Eviction policies and libCacheSim",
        "",
        f"{measured_on(result)}, {options['rounds']} rounds. CPU time; medians with quartiles in brackets; "
        "ratios round by round.",
        "",
        *(f"- {name} {about['version']}: {about['note']}." for name, about in result["about"].items()),
        "",
    ]
    lines += _agreement(result["agreement"])
    title = f"{options['requests']:,} requests for {options['objects']:,} objects, Zipf 1.0, room for 1,000"
    lines += _speed(f"In one call: {title}, million a second", result["batch"])
    lines += _speed(f"One by one from Python: {options['single']:,} of them, million a second", result["singly"])
    return "\n".join([*lines, *_prefix(result["prefix"]), *_growing(result["growing"]), ""])


def _agreement(rows: list[dict[str, Any]]) -> list[str]:
    if not rows:
        return []
    lines = ["## Hits that differ, request by request", ""]
    for requests in dict.fromkeys(row["requests"] for row in rows):
        own = [row for row in rows if row["requests"] == requests]
        policies = list(dict.fromkeys(row["policy"] for row in own))
        lines += [
            f"{'Zipf 1.0' if requests == 'compared' else 'The trace, each hash_id an object'}, {own[0]['num_requests']:,} "
            "requests: how many differ, and the hit rate.",
            "",
            f"| capacity | {' | '.join(policies)} |",
            "|---" * (len(policies) + 1) + "|",
        ]
        for capacity in dict.fromkeys(row["capacity"] for row in own):
            cells = {row["policy"]: row for row in own if row["capacity"] == capacity}
            words = [
                f"{cells[p]['num_different']} ({cells[p]['hit_rate']:.4f})" if p in cells else "-" for p in policies
            ]
            lines.append(f"| {capacity:,} | {' | '.join(words)} |")
        lines.append("")
    return lines


def _speed(title: str, found: dict[str, Any]) -> list[str]:
    names = [name for name in (OURS, PEER) if name in next(iter(found.values()))]
    heads = ["policy", *names, *(["ours over theirs"] if len(names) > 1 else [])]
    lines = [f"## {title}", "", f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for policy, own in found.items():
        cells = [_spread(own[name]) for name in names] + ([_spread(own["ratio"])] if "ratio" in own else [])
        lines.append(f"| {policy} | {' | '.join(cells)} |")
    return [*lines, ""]


def _prefix(found: dict[str, Any]) -> list[str]:
    policies = [name for name in found if not name.startswith("num_")]
    capacities = list(found[policies[0]])
    lines = [
        f"## Prefixes of {found['num_rows']:,} requests, {found['num_blocks']:,} blocks: ms, and hit rate of blocks",
        "",
        f"| policy | {' | '.join(f'{int(capacity):,}' for capacity in capacities)} |",
        "|---" * (len(capacities) + 1) + "|",
    ]
    for policy in policies:
        cells = [f"{_spread(own['ms'])}, {own['hit_rate']:.4f}" for own in found[policy].values()]
        lines.append(f"| {policy} | {' | '.join(cells)} |")
    return [*lines, ""]


def _growing(found: dict[str, Any]) -> list[str]:
    lines = []
    for what, title in (("access", "an access of a flat cache"), ("block", "a block of replayed prefixes")):
        if not found[what]:
            continue
        capacities = list(next(iter(found[what].values())))
        lines += [
            f"## As the capacity grows: ns {title}",
            "",
            f"| policy | {' | '.join(f'{int(capacity):,}' for capacity in capacities)} |",
            "|---" * (len(capacities) + 1) + "|",
        ]
        for policy, row in found[what].items():
            lines.append(f"| {policy} | {' | '.join(f'{value:.0f}' for value in row.values())} |")
        lines.append("")
    return lines


def _spread(spread: dict[str, float]) -> str:
    return f"{spread['median']:.1f} ({spread['low']:.1f}-{spread['high']:.1f})"
