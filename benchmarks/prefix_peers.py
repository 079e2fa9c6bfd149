"""The prefix index and its peers on one workload, side by side, and the index alone at other sizes.

    python -m benchmarks.prefix_peers [--sglang PYTHON] [--dynamo PYTHON] [--vllm PYTHON] [--native PROGRAM] [--out FOLDER]

PYTHON is the interpreter of an environment that has the peer; `benchmarks/prefix/README.md` says how to make one. LMDeploy's
is the one this runs in. Each contestant is a process of its own; all are up at once and asked in turn, and each starts anew
`--starts` times, since two processes of the same code differ. A contestant whose answers are not those that the workload
knows has its figures refused. PROGRAM is the `prefix_index_bench` that CMake builds.
"""

import os
import sys
from pathlib import Path
from typing import Any

import click

from benchmarks.contestants import paired_ratio, summary
from benchmarks.errors import BenchmarkError
from benchmarks.machine import describe
from benchmarks.output import progress, report
from benchmarks.prefix.comparison import Entrant, Plan, measure, num_requests
from benchmarks.prefix.native import run_native
from benchmarks.prefix.report import OURS, markdown, summarise
from benchmarks.prefix.workload import PrefixWorkload
from benchmarks.scenarios import component

PEERS = {
    "sglang": ("SGLang tree core (Rust)", "SGLang RadixCache (Python)"),
    "dynamo": ("Dynamo RadixTree (Rust)",),
    "vllm": ("vLLM KVCacheManager",),
}
BEST_PEER = PEERS["sglang"][0]
LEAVES, COUNTS = (10_000, 1_000_000), (64, 4_096)
READ_TOKENS = (32_768, 131_072)


@click.command()
@click.option("--sglang", help="Python interpreter with SGLang 0.5.23.")
@click.option("--dynamo", help="Python interpreter with ai-dynamo-runtime 1.6.1.")
@click.option("--vllm", help="Python interpreter with the CPU build of vLLM 0.32.0.")
@click.option(
    "--lmdeploy/--no-lmdeploy", default=True, show_default=True,
    help="Measure LMDeploy's trie too, in this environment.",
)
@click.option("--twin", is_flag=True, help="Measure the plain Python twin of the index too.")
@click.option(
    "--native", type=click.Path(path_type=Path),
    help="Program that compares with memcmp, built from sagellm/csrc/bench.",
)
@click.option(
    "--block-size", "block_sizes", type=int, multiple=True, default=(16, 64), show_default=True,
    help="Tokens of a block; may be given several times.",
)
@click.option("--sequences", default=10_000, show_default=True, help="Sequences that are inserted.")
@click.option("--more-sequences", default=100_000, show_default=True, help="Sequences of the second, larger size.")
@click.option("--lookups", default=2_000, show_default=True, help="Lookups of each round.")
@click.option("--rounds", type=click.IntRange(min=1), default=20, show_default=True, help="Rounds of each start.")
@click.option(
    "--starts", type=click.IntRange(min=1), default=2, show_default=True,
    help="Times that every contestant starts anew.",
)
@click.option(
    "--alone/--no-alone", default=True, show_default=True,
    help="Measure other sizes, eviction and threads of the index alone.",
)
@click.option("--seed", default=1, show_default=True, help="Seed of the workload.")
@click.option(
    "--out", type=click.Path(path_type=Path, file_okay=False),
    help="Folder for prefix_peers.json, .csv and .md.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def main(out: Path | None, as_json: bool, **options: Any) -> None:
    """Measure, print a table, and write the result."""
    result = report("prefix_peers", lambda: compare(options), markdown, out=out, as_json=as_json)
    refused = [own["refused"] for contestants in result["peers"].values() for own in contestants.values()]
    sys.exit(1 if any(refused) else 0)


def compare(options: dict[str, Any]) -> dict[str, Any]:
    """The result, ready to be written. Raises BenchmarkError or ValueError for what cannot be measured."""
    load = os.getloadavg()[0]
    peers, alone = {}, {}
    for block_size in options["block_sizes"]:
        plan = Plan(options["seed"], block_size, options["lookups"], options["rounds"], options["starts"])
        peers[str(block_size)] = summarise(_measure(f"blocks of {block_size}", _entrants(options), plan))
    if options["alone"]:
        alone |= _more_sequences(options)
        alone |= _scenarios(options)
    if options["native"] is not None:
        alone |= _memcmp(options)
    return {
        "machine": describe(),
        "load": {"before": load, "after": os.getloadavg()[0]},
        "options": {
            "seed": options["seed"], "rounds": options["rounds"], "starts": options["starts"],
            "num_sequences": options["sequences"], "num_lookups": options["lookups"],
        },
        "peers": peers,
        "alone": alone,
    }  # fmt: skip


def _entrants(options: dict[str, Any]) -> list[Entrant]:
    names = [(OURS, sys.executable)]
    names += [(name, options[which]) for which, peers in PEERS.items() if options[which] for name in peers]
    names += [("LMDeploy BlockTrie", sys.executable)] if options["lmdeploy"] else []
    names += [(f"{OURS}, plain twin", sys.executable)] if options["twin"] else []
    return [Entrant(name, python, name, options["sequences"]) for name, python in names]


def _more_sequences(options: dict[str, Any]) -> dict[str, Any]:
    """Lookups among many sequences over lookups among few, the same contestant twice."""
    few, many, found = options["sequences"], options["more_sequences"], {}
    who = [(OURS, sys.executable)] + ([(BEST_PEER, options["sglang"])] if options["sglang"] else [])
    for block_size in options["block_sizes"]:
        entrants = [Entrant(f"{name}, {n:,}", python, name, n) for name, python in who for n in (few, many)]
        plan = Plan(options["seed"], block_size, options["lookups"], options["rounds"], 1, evict=False)
        figures = _measure(f"{many:,} sequences", entrants, plan)
        for name, _ in who:
            at_few, at_many = (figures[f"{name}, {n:,}"] for n in (few, many))
            if at_few["refused"] or at_many["refused"]:
                raise BenchmarkError(f"{name} is refused: {at_few['refused'] or at_many['refused']}")
            which = f"{name}, blocks of {block_size}:"
            ratio = paired_ratio(at_many["lookup_us"]["lookup"], at_few["lookup_us"]["lookup"])
            found[f"{which} lookup among {many:,} sequences over {few:,}"] = ratio
            found[f"{which} bytes a cached token, {many:,} sequences"] = summary(at_many["bytes_per_token"])
    return found


def _scenarios(options: dict[str, Any]) -> dict[str, Any]:
    """The component scenarios of eviction and threads, each run a few times."""
    cases = [
        ("prefix_eviction", f"{leaves:,} leaves, {count:,} a call", {"num_leaves": leaves, "count": count})
        for leaves in LEAVES
        for count in COUNTS
    ] + [("prefix_readers", f"prompts of {tokens:,}", {"num_tokens": tokens}) for tokens in READ_TOKENS]
    found: dict[str, list[float]] = {}
    with progress("eviction, threads", len(cases) * options["starts"]) as advance:
        for number in range(options["starts"]):
            for name, text, values in cases:
                module = component(name, values)
                metrics = module.run(options["seed"] + number, **{**module.OPTIONS, **values})
                for metric, value in metrics.items():
                    found.setdefault(f"{metric}, {text}", []).append(value)
                advance()
    return {key: summary(values) for key, values in found.items()}


def _memcmp(options: dict[str, Any]) -> dict[str, Any]:
    found = {}
    with progress("memcmp", len(options["block_sizes"])) as advance:
        for block_size in options["block_sizes"]:
            workload = PrefixWorkload(options["seed"], block_size, options["sequences"], options["lookups"])
            answer = run_native(options["native"], workload, options["rounds"] * options["starts"])
            which = f"C++, blocks of {block_size}:"
            found[f"{which} us a lookup"] = summary([value / 1e3 for value in answer["lookup_ns"]])
            found[f"{which} us to compare the same tokens with memcmp"] = summary(
                [value / 1e3 for value in answer["memcmp_ns"]]
            )
            found[f"{which} lookup over memcmp"] = paired_ratio(answer["lookup_ns"], answer["memcmp_ns"])
            advance()
    return found


def _measure(text: str, entrants: list[Entrant], plan: Plan) -> dict[str, Any]:
    with progress(text, num_requests(entrants, plan)) as advance:
        return measure(entrants, plan, advance)


if __name__ == "__main__":
    main()
