"""Runs what an engine's plug-in recorded through the same modules again, and lists every decision that differs.

The lines `kv_*` of an event log are the events and decisions of `kv_runtime.HierarchyManager`. A fresh manager, built from
`kv_open`, gets the same events; every line that it writes must equal the recorded one, field by field. Its match of a
request must also equal the engine's own line `lookup`.
"""

import json
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sagellm.core.errors import PolicyError, SageError, TraceError
from sagellm.core.events import FORMAT as EVENTS_FORMAT
from sagellm.core.hooks import MigrationPlan, MigrationResult, Tier
from sagellm.kv_policy.base import BlockKey, MigrationPolicy
from sagellm.kv_runtime.hierarchy import FORMAT, HierarchyManager, MakePolicy
from sagellm.kv_runtime.lines import block_of, keys_of
from sagellm.kv_runtime.quota import QuotaManager
from sagellm.kv_runtime.tier_spec import TierSpec
from sagellm.replay.base import shortened
from sagellm.replay.fields import check_fields
from sagellm.replay.record_lines import HEAD, Checked, Difference, check_number, record_lines

__all__ = ["VerifyReport", "verify_log"]

OPEN = "kv_open"
ENGINE_FIELDS = ("pid", "n", "matched")  # of the engine's own lines; others have other meanings there
DECISIONS = ("kv_room", "kv_fetch")
MakeMigration = Callable[..., "MigrationPolicy | None"]  # (name, **options)


@dataclass(slots=True)
class VerifyReport(Checked):
    """Contents of a log, and the result of its replay.

    Attributes:
        counts: lines by event, of those that were replayed.
        num_decisions: of these, decisions on room and loads; `num_hits`: blocks found, of `num_asked`.
    """

    counts: Counter[str] = field(default_factory=Counter)
    num_decisions: int = 0
    num_victims: int = 0
    num_asked: int = 0
    num_hits: int = 0

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            **Checked.to_dict(self), "counts": dict(self.counts), "decisions": self.num_decisions,
            "victims": self.num_victims, "blocks_asked": self.num_asked, "blocks_found": self.num_hits,
        }  # fmt: skip


class _Process:
    """One process that wrote to the log: where its counter is, and its manager once there was a `kv_open`."""

    def __init__(self) -> None:
        self.next_number: int | None = None
        self.manager: HierarchyManager | None = None
        self.written: list[dict[str, Any]] = []
        self.block_size: int | None = None
        self.lookups: deque[tuple[int, Any, int]] = deque()  # line, request, tokens found, by the engine's word
        self.num_differences = 0
        self.is_closed = False


def verify_log(
    path: Path | str, *, make_policy: Callable[..., Any] | None = None, make_migration: MakeMigration | None = None,
    max_differences: int = 1000,
) -> VerifyReport:  # fmt: skip
    """Replay the log. Events after a first difference are replayed too: one cause may show as many differences.

    Args:
        make_policy, make_migration: build policies by name; default: `sagellm.kv_policy.registry`.

    Raises:
        TraceError: an unreadable file, a malformed line (with its number), or no `kv_open` in it.
    """
    report = VerifyReport(str(path))
    processes: dict[Any, _Process] = {}
    for number, line in record_lines(Path(path), report):
        event = line["event"]
        try:
            _check_format(event, line)  # first, since another format has other fields
            check_fields(
                line if event.startswith("kv_") else {name: line[name] for name in ENGINE_FIELDS if name in line}
            )
            process = processes.setdefault(line.get("pid"), _Process())
            process.next_number = check_number(process.next_number, number, line, report)
            process.is_closed = event == "close"
            if event == "lookup":
                process.lookups.append((number, line["request"], line["matched"]))
            if not event.startswith("kv_"):
                continue
            if event == OPEN:
                process.manager = _manager(line, process, make_policy, make_migration)
                process.written.clear()
                process.block_size = line.get("block_size")
            elif process.manager is None:
                raise TraceError(f"{path}, line {number}: {event} before {OPEN}; the beginning of the log is missing.")
            elif process.num_differences < max_differences:
                _replay(process, number, line, report)
            report.counts[event] += 1
        except TraceError:
            raise
        except (SageError, KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError) as error:
            raise TraceError(f"{path}, line {number}: {event}: {_what(error).rstrip('.')}.") from error
    report.num_open = sum(process.manager is not None and not process.is_closed for process in processes.values())
    if not report.counts[OPEN]:
        raise TraceError(f"{path} holds no {OPEN} line; record an engine that runs with a KV policy (--kv-policy).")
    return report


def _check_format(event: str, line: dict[str, Any]) -> None:
    if event == OPEN and line["format"] != FORMAT:
        raise ValueError(f"format {shortened(line['format'])}; this version replays format {FORMAT}")
    if event == "open" and line.get("format", EVENTS_FORMAT) != EVENTS_FORMAT:
        raise ValueError(f"format {shortened(line['format'])}; this version reads format {EVENTS_FORMAT}")


def _manager(
    line: dict[str, Any], process: _Process, make_policy: MakePolicy | None, make_migration: MakeMigration | None
) -> HierarchyManager:
    tiers = [TierSpec(**row) for row in line["tiers"]]
    migration = line.get("migration")
    policy = None
    if migration is not None:
        policy = (make_migration or _make_migration)(migration["name"], **migration["options"])
    quota = QuotaManager(line.get("quotas") or {}, {Tier(spec.tier): spec.capacity for spec in tiers})
    return HierarchyManager(
        tiers, migration=policy, quota=quota, make_policy=make_policy,
        record=lambda event, **fields: process.written.append({"event": event, **fields}),
    )  # fmt: skip


def _replay(process: _Process, number: int, line: dict[str, Any], report: VerifyReport) -> None:
    event = line["event"]
    feed = _FEEDS.get(event)
    if feed is None:
        raise ValueError(f"unknown event; known are {', '.join(sorted(_FEEDS))}")
    recorded = {name: value for name, value in line.items() if name not in HEAD}
    found: list[Difference] = []
    try:
        feed(process.manager, line)
    except PolicyError as error:
        found.append(Difference(number, event, "", recorded, f"PolicyError: {error}"))
    # As JSON, so that what was read and what was made now have the same types.
    written = [json.loads(json.dumps(each)) for each in process.written]
    process.written.clear()
    if written:
        replayed = {name: value for name, value in written[0].items() if name != "event"}
        for name in dict.fromkeys([*recorded, *replayed]):
            if recorded.get(name) != replayed.get(name):
                found.append(Difference(number, event, name, recorded.get(name), replayed.get(name)))
    if event == "kv_lookup" and written:
        found += _against_engine(process, line["request"], written[0]["found"])
    process.num_differences += len(found)
    report.differences += found
    report.num_decisions += event in DECISIONS
    report.num_victims += len(line.get("victims", ()))
    if event == "kv_lookup":
        report.num_asked += len(line["keys"])
        report.num_hits += line["found"]


def _against_engine(process: _Process, request: Any, num_found: int) -> list[Difference]:
    """Return the engine's own result of this lookup, if it differs. Lookups that the plug-in was not told of are passed
    over."""
    while process.lookups and process.block_size:
        number, other, num_tokens = process.lookups.popleft()
        if other == request:
            replayed = num_found * process.block_size
            return [] if replayed == num_tokens else [Difference(number, "lookup", "matched", num_tokens, replayed)]
    return []


def _feed_moved(manager: HierarchyManager, line: dict[str, Any]) -> None:
    keys = tuple(keys_of(line["keys"]))
    refused = {BlockKey(int(key, 16)): why for key, why in line["refused"].items()}
    plan = MigrationPlan(Tier(line["src"]), Tier(line["dst"]), (*keys, *refused))
    manager.moved(plan, MigrationResult(keys, dict(refused)), line["time_s"])


def _on_keys(name: str) -> Callable[[HierarchyManager, dict[str, Any]], None]:
    return lambda manager, line: getattr(manager, name)(keys_of(line["keys"]), line["time_s"])


_FEEDS: dict[str, Callable[[HierarchyManager, dict[str, Any]], Any]] = {
    "kv_lookup": lambda to, line: to.looked_up(line["request"], keys_of(line["keys"]), line["limit"], line["time_s"]),
    "kv_stored": lambda to, line: to.stored(line["request"], [block_of(row) for row in line["blocks"]], line["time_s"]),
    "kv_released": lambda to, line: to.released(line["request"], line["num_kept"], line["time_s"]),
    "kv_dropped": lambda to, line: to.dropped(
        Tier(line["tier"]), keys_of(line["keys"]), line["time_s"], evicted=line["evicted"]
    ),
    "kv_moved": _feed_moved,
    "kv_saving": _on_keys("saving"),
    "kv_saved": _on_keys("saved"),
    "kv_loading": _on_keys("loading"),
    "kv_loaded": _on_keys("loaded"),
    "kv_failed": lambda to, line: to.failed(keys_of(line["keys"]), line["reason"], line["time_s"]),
    "kv_adopted": lambda to, line: to.adopted(
        [block_of(row) for row in line["blocks"]], Tier(line["tier"]), line["time_s"]
    ),
    "kv_corrected": lambda to, line: to.corrected(keys_of(line["locked"]), keys_of(line["unlocked"]), line["time_s"]),
    "kv_occupied": lambda to, line: to.occupied(Tier(line["tier"]), line["count"], line["time_s"]),
    "kv_calibrated": lambda to, line: to.calibrated(line["model"]),
    "kv_exchanged": lambda to, line: to.exchange_policy(
        Tier(line["tier"]), line["policy"], line["options"], line["time_s"]
    ),
    "kv_room": lambda to, line: to.make_room(
        Tier(line["tier"]), line["count"], keys_of(line["incoming"]), line["time_s"]
    ),
    "kv_fetch": lambda to, line: to.fetch(
        line["request"], keys_of(line["keys"]), line["num_resident"], line["time_s"], line["num_running"], line["queued_bytes"]
    ),
}  # fmt: skip


def _make_migration(name: str, **options: Any) -> "MigrationPolicy | None":
    from sagellm.kv_policy.registry import make_migration_policy

    return make_migration_policy(name, **options)


def _what(error: Exception) -> str:
    return f"the field {error} is missing" if isinstance(error, KeyError) else str(error)
