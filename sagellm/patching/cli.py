"""The command line: `python -m sagellm.patching [VERB] [--target DIR]... [--json]`."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sagellm.core.errors import PatchError
from sagellm.patching.edit import Outcome, carry_out, check, make_plan
from sagellm.patching.patchset import load_patchset
from sagellm.patching.regenerate import refresh
from sagellm.patching.state import APPLIED, FOREIGN, NOT_APPLIED, PARTIAL, TreeState, tree_state
from sagellm.patching.tree import default_targets, locate

OK, NO = 0, 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Exit code 0: fine, 1: the answer is no, 2: misuse."""
    options = parse(arguments)
    try:
        document, lines, code = _run(options)
    except PatchError as error:
        if options.json:
            print(json.dumps({"error": str(error)}, indent=1))
        else:
            print(f"error: {error}", file=sys.stderr)
        return NO
    print(json.dumps(document, indent=1) if options.json else "\n".join(lines))
    return code


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options; ends the process with code 2 when they are wrong."""
    return _parser().parse_args(arguments)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m sagellm.patching", description="Apply the patch series to an LMDeploy tree (default), or:"
    )
    verbs = parser.add_mutually_exclusive_group()
    verbs.add_argument("--check", action="store_true", help="say whether the series would apply; write nothing")
    verbs.add_argument("--status", action="store_true", help="say which patches are in the tree; write nothing")
    verbs.add_argument("--reverse", action="store_true", help="take the series out again, byte for byte")
    verbs.add_argument(
        "--refresh", nargs="*", metavar="NNNN", type=_number, help="regenerate the patches from an edited tree"
    )
    parser.add_argument(
        "--target",
        action="append",
        type=_directory,
        metavar="DIR",
        help="tree to work on; may be given repeatedly "
        "(default: the installed LMDeploy, and the submodule where it is checked out)",
    )
    parser.add_argument("--patches", type=_directory, metavar="DIR", help="directory of the series")
    parser.add_argument("--force", action="store_true", help="replace marked lines that are not those of this series")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    return parser


def _number(text: str) -> str:
    if not re.fullmatch(r"\d{4}", text):
        raise argparse.ArgumentTypeError(f"got {text!r}, wanted the four digits of a patch, like 0001")
    return text


def _directory(text: str) -> Path:
    if not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is not a directory")
    return Path(text)


def _run(options: argparse.Namespace) -> tuple[dict[str, Any], list[str], int]:
    if options.refresh is not None:
        return _refresh(options)
    targets = options.target or default_targets()
    if options.check:
        return _check(targets, options.patches)
    if options.status:
        patchset = load_patchset(options.patches)
        states = [tree_state(locate(target), patchset) for target in targets]
        documents, lines = [_state_document(state) for state in states], []
        for state in states:
            lines += _table(state)
        return _with_overall(documents), lines, OK if all(state.applied for state in states) else NO
    return _edit(targets, options)


def _edit(targets: list[Path], options: argparse.Namespace) -> tuple[dict[str, Any], list[str], int]:
    patchset = load_patchset(options.patches)
    # Every tree is planned before any is written: a refusal of the second leaves the first alone too.
    plans = [make_plan(locate(target), patchset, reverse=options.reverse, force=options.force) for target in targets]
    documents, lines = [], []
    for outcome in [carry_out(plan) for plan in plans]:
        document = _state_document(outcome.state)
        documents.append({**document, "written": list(outcome.written), "removed": list(outcome.removed)})
        lines += [*_table(outcome.state), "  " + _summary(outcome)]
    return _with_overall(documents), lines, OK


def _check(targets: list[Path], patches: Path | None) -> tuple[dict[str, Any], list[str], int]:
    reports = [check(target, patches=patches) for target in targets]
    lines = []
    for report in reports:
        verdict = f"applies, {len(report.pending)} files to write" if report.ok else "does not apply"
        lines += [f"{report.target}: {verdict}", *(f"  {problem}" for problem in report.problems)]
    documents = [
        {"target": str(r.target), "ok": r.ok, "problems": list(r.problems), "pending": list(r.pending)} for r in reports
    ]
    ok = all(report.ok for report in reports)
    return {"ok": ok, "targets": documents}, lines, OK if ok else NO


def _refresh(options: argparse.Namespace) -> tuple[dict[str, Any], list[str], int]:
    if options.target and len(options.target) > 1:
        raise PatchError(f"--refresh reads one tree, got {len(options.target)}; refresh from each in turn")
    target = options.target[0] if options.target else None
    report = refresh(target, tuple(options.refresh), patches=options.patches)
    lines = [f"note: {note}" for note in report.notes]
    lines += [f"wrote {name}" for name in report.written] or ["the series is up to date"]
    document = {"target": str(report.target), "written": list(report.written), "notes": list(report.notes)}
    return document, lines, OK


def _state_document(state: TreeState) -> dict[str, Any]:
    return {
        "target": str(state.target),
        "lmdeploy": state.version,
        "state": state.state,
        "patches": [{"patch": p.name, "state": p.state, "files": p.files} for p in state.patches],
        "reason": state.reason,
        "command": state.command,
    }


def _with_overall(documents: list[dict[str, Any]]) -> dict[str, Any]:
    states = {document["state"] for document in documents}
    overall = next((s for s in (FOREIGN, PARTIAL) if s in states), None)
    if overall is None:
        overall = states.pop() if len(states) == 1 else PARTIAL
    return {"state": overall, "targets": documents}


def _table(state: TreeState) -> list[str]:
    lines = [f"{state.target} (LMDeploy {state.version}): {state.state}"]
    width = max([len(patch.name) for patch in state.patches] + [len("patch")])
    lines.append(f"  {'patch':<{width}}  files  state")
    lines += [f"  {patch.name:<{width}}  {patch.files:>5}  {patch.state}" for patch in state.patches]
    if state.reason and state.state not in (APPLIED, NOT_APPLIED):
        lines.append(f"  {state.reason}")
    if state.command:
        lines.append(f"  to apply it: {state.command}")
    return lines


def _summary(outcome: Outcome) -> str:
    if not outcome.written and not outcome.removed:
        return "nothing to do"
    return f"{len(outcome.written)} files written, {len(outcome.removed)} removed; read back and verified"
