"""Figures of the README come from result files and from the patches; words and tables stay within bounds."""

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
# Suffixes of tracked files; a picture is a plot of a committed result.
SUFFIXES = {
    "", ".c", ".cpp", ".csv", ".gz", ".h", ".html", ".json", ".jsonl", ".md", ".patch", ".png", ".py", ".pyi", ".sh", ".toml",
    ".txt", ".typed", ".yaml", ".yml",
}  # fmt: skip
README = (ROOT / "README.md").read_text()
RESULTS = ROOT / "benchmarks" / "results"
MAX_WORDS, MAX_RESULTS = 1100, 10


def row(file: str) -> str:
    """Lines of the README's table of results that link to this file."""
    return "\n".join(line for line in README.splitlines() if line.startswith("|") and f"benchmarks/results/{file}" in line)


def cell(result: Any, batch: int, length: int) -> Any:
    (found,) = [each for each in result["cells"] if (each["batch"], each["length"]) == (batch, length)]
    return found


def work(result: Any, name: str) -> Any:
    """Cell of batch 1 of a kind of work."""
    return next(each for each in result["cells"] if (each["work"], each["batch"]) == (name, 1))


def quality(result: Any, name: str) -> Any:
    return next(each for each in result["models"] if each["name"] == name)


def prefix_us(result: Any, name: str) -> float:
    """Median over the rounds, blocks of 16 tokens."""
    return median(result["peers"]["16"][name]["rounds"]["lookup_us"]["lookup"])


FIGURES: list[tuple[str, str, Callable[[Any], float]]] = [
    *(
        ("cpu_engine_smollm2.json", "{:.0f} tokens/s", lambda r, name=name: cell(r, 8, 512)["tokens_s"][name]["median"])
        for name in ("sagellm", "transformers", "vLLM")
    ),
    ("quality.json", "{:.5f}", lambda r: quality(r, "sagellm bfloat16")["kl_mean"]),
    ("quality.json", "{:.5f}", lambda r: quality(r, "transformers bfloat16")["kl_mean"]),
    ("prefix_peers.json", "{:.1f} us", lambda r: prefix_us(r, "sagellm")),
    ("prefix_peers.json", "{:.1f} us", lambda r: prefix_us(r, "SGLang tree core (Rust)")),
    ("hook_overhead.json", "{:.3f}", lambda r: list(r["ratio"].values())[1]["median"]),
    ("hook_overhead.json", "{:.3f}", lambda r: r["ratio"]["no-op plug-in on every hook"]["median"]),
    ("policy_peers.json", "{:.0f} different hits", lambda r: sum(each["num_different"] for each in r["agreement"])),
    ("kv_replay.json", "{:,.0f} evictions", lambda r: sum(each["victims"] for each in r["rows"])),
    ("kv_replay.json", "{:.0f} differences", lambda r: sum(each["differences"] for each in r["rows"])),
    ("kv_tiers_smollm2.json", "{:,.0f} ms", lambda r: 1000 * r["first_s"]["no tiers"]["mean"]),
    ("kv_tiers_smollm2.json", "{:,.0f} ms", lambda r: 1000 * r["first_s"]["cpu tier"]["mean"]),
    ("schedules_smollm2.json", "{:.1f} s", lambda r: r["mixed"]["medians"]["fifo"]["chat"]["ttft_p95_s"]),
    ("schedules_smollm2.json", "{:.1f} s", lambda r: r["mixed"]["medians"]["hybrid"]["chat"]["ttft_p95_s"]),
    ("speculate_smollm2.json", "{:.2f} times", lambda r: work(r, "chat")["strategies"]["suffix"]["times_none"]["median"]),
    ("speculate_smollm2.json", "{:.2f} times", lambda r: work(r, "code")["strategies"]["suffix"]["times_none"]["median"]),
    ("pd_smollm2.json", "{:.0f} ms", lambda r: r["metrics"]["pd_interference"]["pd_interference_hybrid_p99_ms"]),
    ("pd_smollm2.json", "{:.0f} ms", lambda r: r["metrics"]["pd_interference"]["pd_interference_pd_p99_ms"]),
]


@pytest.mark.parametrize(("file", "form", "value"), FIGURES)
def test_figures_are_those_of_the_result_files(file: str, form: str, value: Callable[[Any], float]) -> None:
    text = form.format(value(json.loads((RESULTS / file).read_text())))
    assert re.search(rf"(?<![\d.,]){re.escape(text)}", row(file)), f"README should say {text} beside {file}: {row(file)}"


def test_no_figure_of_the_table_is_unchecked() -> None:
    """Each number with a unit in a row of results belongs to a figure above."""
    for file in {file for file, _, _ in FIGURES}:
        result = json.loads((RESULTS / file).read_text())
        known = {form.format(value(result)) for name, form, value in FIGURES if name == file}
        cells = [part for line in row(file).splitlines() for part in line.split("|")[2:4]]
        told = re.findall(r"[\d.,]*\d(?: [a-z/]+)*", " ".join(cells))
        assert {text for text in told} <= known, f"{file}: {sorted(set(told) - known)} in the README, {sorted(known)} known"


def inserted() -> tuple[int, int]:
    """Lines that the series inserts into files of LMDeploy, and lines of its new files."""
    into, new = 0, 0
    for patch in (ROOT / "patches").glob("*.patch"):
        is_new = False
        for line in patch.read_text().splitlines():
            if line.startswith("--- "):
                is_new = line.startswith("--- /dev/null")
            elif line.startswith("+") and not line.startswith("+++ "):
                into, new = (into, new + 1) if is_new else (into + 1, new)
    return into, new


def test_size_of_the_patches() -> None:
    into, new = inserted()
    assert f"{into} lines into LMDeploy's files and adds {new:,} lines in new files" in README


def test_readme_is_one_page() -> None:
    assert len(README.split()) <= MAX_WORDS
    table = README.split("## Results")[1].split("\n## ")[0]
    rows = [line for line in table.splitlines() if line.startswith("|")][2:]
    assert 1 <= len(rows) <= MAX_RESULTS


def test_links_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", README)
    assert links and not [link for link in links if not (ROOT / link).exists()]


def test_no_binary_or_package_of_others_is_tracked() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout")
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\n")
    assert not [file for file in files if Path(file).suffix not in SUFFIXES]
