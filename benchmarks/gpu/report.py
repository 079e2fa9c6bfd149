"""The page of a run of the kit."""

from collections.abc import Iterator
from typing import Any

__all__ = ["markdown"]


def markdown(result: dict[str, Any]) -> str:
    """Return the page: the machine, then a table of each part's checks and figures."""
    device, machine = result["device"], result["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items() if version)
    lines = [
        f"# {device.get('model', machine['processor'])}, {result['date']}", "",
        f"Revision {machine['commit']}; Python {machine['python']}; {versions}.", "",
    ]  # fmt: skip
    if numbers := [(name, value) for name, value in device.items() if name not in ("name", "model")]:
        lines += ["| device | |", "|---|---|", *(f"| {name} | {_text(value)} |" for name, value in numbers), ""]
    for name, found in result["parts"].items():
        lines += [f"## {name}", ""]
        if "error" in found:
            lines += [f"Broken: {found['error']}, after {found['seconds']:.0f} s.", "", "```", found["log"].strip(), "```", ""]
            continue
        if found["checks"]:
            lines += ["| check | |", "|---|---|"]
            lines += [f"| {text} | {'yes' if holds else '**no**'} |" for text, holds in found["checks"].items()]
            lines += [""]
        lines += ["| figure | |", "|---|---|"]
        lines += [f"| {path} | {_text(value)} |" for path, value in _leaves(found["figures"])]
        lines += [""]
    return "\n".join(lines)


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The numbers of nested figures with their paths; a median with its quartiles is one of them."""
    if isinstance(value, dict) and value and value.keys() != {"median", "low", "high"}:
        for name, each in value.items():
            yield from _leaves(each, f"{path}, {name}" if path else str(name))
    else:
        yield path, value


def _text(value: Any) -> str:
    if isinstance(value, dict) and value.keys() == {"median", "low", "high"}:
        return f"{value['median']:.4g} ({value['low']:.4g} to {value['high']:.4g})"
    return f"{value:.4g}" if isinstance(value, float) else str(value).replace("|", "\\|").replace("\n", " ")
