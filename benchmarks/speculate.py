"""Speculative strategies in the real engine, against none, on the same requests.

    python -m benchmarks.speculate [--model demo] [--work copy,random] [--batch 1,4,16] [--strategy ngram,...] [--rounds 5]
        [--processes 1]

CPU engine, no prefix caching. The contestants take turns, round by round, each round on new prompts that all get alike, on the
demo model six or more, batch after batch. Tokens a second are those of decoding: from when the last request of a batch has its
first token. No question is asked twice. Equal engines differ by 4% from process to process, so a ratio near 1 takes
several `--processes` of each contestant. All are asked in every round and compared with the round's median of those
without guesses.
Models:

- *demo*: the demo model, float32, and a draft trained on the same text: code that it knows by heart. Work *copy*: a
question, its answer, and the question again; for half the questions at least half of the answer is in the prompt. Work
*fresh*: a question that was not asked before. Work *random*: letters, answered at temperature 1. Answers of *copy* and
  *fresh* end where the model ends them;
- *smollm2*: SmolLM2-135M-Instruct in bfloat16. Work *chat*: a question about a passage of English; *code*: code to be
  continued; *copy*: a passage to be written again; *random*: chats, answered at temperature 1. Answers of *chat* and *copy*
  end where the model ends them;
- *0.5B*: Qwen2.5-0.5B's shape in bfloat16 with weights that follow a text (`speculation/chain_model.py`). Work *copy*: a text
  with 8% of its tokens changed, to be said without the changes; *random*: its tokens in random order, so that n-grams are
  always found and always wrong.
"""

import functools
import itertools
import math
import statistics
import tempfile
from pathlib import Path
from typing import Any

import click

from benchmarks.contestants import Contestant, paired_ratio, summary
from benchmarks.models.real_text import model_folder
from benchmarks.output import Output, spread, table, with_output
from benchmarks.speculation.engine import NONE, build
from benchmarks.speculation.texts import ChainTexts, DemoTexts, Texts
from sagellm.accel.speculative.registry import find_speculator
from sagellm.cli.values import read_options
from sagellm.core.errors import SpeculationError

STRATEGIES = ("ngram", "suffix", "dynamic:ngram", "dynamic:suffix", "draft")
WORKS = {"demo": ("copy", "fresh", "random"), "smollm2": ("chat", "code", "copy", "random"), "0.5B": ("copy", "random")}
NEW = {
    "copy": {"demo": 256, "smollm2": 128, "0.5B": 96}, "fresh": {"demo": 256}, "chat": {"smollm2": 96}, "code": {"smollm2": 96},
    "random": {"demo": 128, "smollm2": 96, "0.5B": 96},
}  # fmt: skip
A_ROUND = {"demo": 6, "smollm2": 2, "0.5B": 1}  # prompts at least
WITHOUT_END = ("random", "code")
VOCABULARY = 151_936


@click.command()
@click.option("--model", type=click.Choice(list(WORKS)), default="demo", show_default=True, help="Model to measure on.")
@click.option("--work", "works", help="Kinds of work, separated by commas; default: all of the model.")
@click.option("--batch", "batches", default="1,4,16", show_default=True, help="Batch sizes, separated by commas.")
@click.option(
    "--strategy", "strategies", help="Strategies, separated by commas; default: all of the model. NAME@LABEL is NAME once more."
)
@click.option("--options", default="{}", metavar="JSON", help='Options by strategy: {"ngram": {"lookahead": 8}}.')
@click.option("--rounds", type=click.IntRange(2), default=5, show_default=True, help="Rounds of each contestant.")
@click.option("--processes", type=click.IntRange(1), default=1, show_default=True, help="Processes of each contestant.")
@click.option("--threads", default=2, show_default=True, help="Compute threads of an engine.")
@click.option("--tensor-parallel", "workers", default="1", show_default=True, help="Workers of an engine, separated by commas.")
@with_output
def main(
    model: str, works: str | None, batches: str, strategies: str | None, options: str, rounds: int, processes: int,
    threads: int, workers: str, output: Output,
) -> None:  # fmt: skip
    """Measure, print, and write the result."""
    chosen = works.split(",") if works else list(WORKS[model])
    if unknown := set(chosen) - set(WORKS[model]):
        raise click.BadParameter(f"{', '.join(sorted(unknown))}: no work of {model}; known are {', '.join(WORKS[model])}.")
    known = [name for name in STRATEGIES if model == "demo" or name != "draft"]
    names = [NONE, *(strategies.split(",") if strategies else known)]
    given = _options(options, names)
    result: dict[str, Any] = {
        "model": model, "threads": threads, "rounds": rounds, "processes": processes, "options": given, "cells": [],
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as scratch:
        folder = _model(model, Path(scratch))
        if "draft" in names and "model" not in given.get("draft", {}):
            given["draft"] = {"model": str(_draft(model))} | given.get("draft", {})
        texts = _texts(model, folder)
        cells = itertools.product(chosen, map(int, batches.split(",")), map(int, workers.split(",")))
        for work, batch, num_workers in cells:
            settings = {"tensor_parallel": num_workers}  # which share the threads
            # New engines for each, so that no strategy remembers what was said before.
            contestants = [
                Contestant(name, build, str(folder), threads // num_workers, _strategy(name), given.get(name, {}), settings)
                for _ in range(processes)
                for name in names
            ]
            try:
                cell = _cell(contestants, model, texts, work, batch, rounds) | settings
            finally:
                for contestant in contestants:
                    contestant.close()
            result["cells"].append(cell)
            output.say(shown(cell))
    output.finish(result)


def _options(text: str, names: list[str]) -> dict[str, dict[str, Any]]:
    """By strategy. Raises click.UsageError: no JSON object of objects, or a name that is no strategy of this run."""
    given = read_options("--options", text, {"ngram": {"lookahead": 8}})
    if unknown := sorted(set(given).difference(names)):
        raise click.UsageError(f"--options names {', '.join(unknown)}; measured are {', '.join(names[1:])}.")
    for name in names[1:]:
        if not isinstance(given.setdefault(name, {}), dict):
            raise click.UsageError(f"--options: {name} has {given[name]!r}; give an object of names and values.")
        try:
            find_speculator(_strategy(name))
        except SpeculationError as error:
            raise click.UsageError(str(error)) from None
    return given


def _strategy(name: str) -> str:
    """Without its label: one strategy may be measured with several options."""
    return name.partition("@")[0]


def _model(model: str, scratch: Path) -> Path:
    if model == "0.5B":
        from benchmarks.cpu_engine import write_half_billion
        from benchmarks.speculation.chain_model import write_chain_model

        return write_chain_model(write_half_billion(scratch))
    return model_folder(model)


def _texts(model: str, folder: Path) -> ChainTexts | DemoTexts | Texts:
    if model == "0.5B":
        return ChainTexts(VOCABULARY)
    return DemoTexts(folder) if model == "demo" else Texts(folder)


def _draft(model: str) -> Path:
    if model != "demo":
        raise click.UsageError(f'{model} has no draft model; name one: --options \'{{"draft": {{"model": "FOLDER"}}}}\'.')
    from sagellm.demo_model import DemoRecipe, ensure_demo_model

    return ensure_demo_model(recipe=DemoRecipe().draft())


def _cell(
    contestants: list[Contestant], model: str, texts: ChainTexts | DemoTexts | Texts, work: str, batch: int, rounds: int
) -> dict[str, Any]:
    plain = contestants[0]
    texts.begin(work, functools.partial(_answers, plain, NEW[work][model], texts.ends))
    answers: dict[str, list[list[Any]]] = {contestant.name: [] for contestant in contestants}  # round by round, of each process
    for number in range(rounds + 1):  # the first one warms up
        prompts = texts.prompts(work, batch * math.ceil(A_ROUND[model] / batch), number)
        request = {
            "batches": [prompts[start : start + batch] for start in range(0, len(prompts), batch)], "new": NEW[work][model],
            "stop": () if work in WITHOUT_END else texts.ends,
            "temperature": 1.0 if model != "0.5B" and work == "random" else 0.0,
        }  # fmt: skip
        turn = number % len(contestants)
        told: dict[str, list[Any]] = {name: [] for name in answers}
        for contestant in [*contestants[turn:], *contestants[:turn]]:
            told[contestant.name].append(contestant.ask(request))
        if number:
            for name, every in told.items():
                answers[name].append(every)
    none = answers[plain.name]
    return {
        "work": work, "batch": batch,
        "none_tokens_per_s": summary([each["tokens_per_s"] for told in none for each in told]),
        "none_processes": _by_process(none, none),
        "strategies": {name: _figures(every, none) for name, every in answers.items() if name != plain.name},
    }  # fmt: skip


def _answers(plain: Contestant, new: int, stop: tuple[int, ...], prompts: list[list[int]]) -> list[list[int]]:
    return plain.ask({"batches": [prompts], "new": new, "stop": stop, "temperature": 0.0})["tokens"]


def _figures(rounds: list[list[dict[str, Any]]], none: list[list[dict[str, Any]]]) -> dict[str, Any]:
    every = [each for told in rounds for each in told]
    total = {name: sum(each["counts"][name] for each in every) for name in every[0]["counts"]}
    pairs = [
        pair
        for ours, theirs in zip(rounds, none, strict=True)
        for each in ours
        for pair in zip(each["tokens"], theirs[0]["tokens"], strict=True)
    ]
    return {
        "times_none": _ratio(rounds, none, "tokens_per_s"), "times_none_cpu": _ratio(none, rounds, "cpu_s"),
        "processes": _by_process(rounds, none),
        "acceptance": total["accepted"] / total["drafted"] if total["drafted"] else 0.0,
        "tokens_per_step": 1 + total["accepted"] / total["sequences"] if total["sequences"] else 0.0,
        "rows_per_step": 1 + total["drafted"] / total["sequences"] if total["sequences"] else 0.0,
        "propose_share": total["propose_s"] / (total["propose_s"] + total["step_s"]) if total["step_s"] else 0.0,
        "equal": sum(one == two for one, two in pairs) / len(pairs), "faults": total["faults"],
    }  # fmt: skip


def _ratio(ours: list[list[dict[str, Any]]], theirs: list[list[dict[str, Any]]], figure: str) -> dict[str, float]:
    """Round by round, by the median process of each."""
    return paired_ratio(_medians(ours, figure), _medians(theirs, figure))


def _medians(rounds: list[list[dict[str, Any]]], figure: str) -> list[float]:
    return [statistics.median([each[figure] for each in told]) for told in rounds]


def _by_process(rounds: list[list[dict[str, Any]]], none: list[list[dict[str, Any]]]) -> list[float]:
    """Tokens a second of each process, by those of the median process without guesses: how far equal engines differ."""
    usual = _medians(none, "tokens_per_s")
    return [
        statistics.median([each["tokens_per_s"] / one for each, one in zip(process, usual, strict=True)])
        for process in zip(*rounds, strict=True)
    ]


def shown(cell: dict[str, Any]) -> str:
    """Return the cell as a table."""
    where = f"{cell['work']}, batch {cell['batch']}"
    if cell["tensor_parallel"] > 1:
        where += f", {cell['tensor_parallel']} workers"
    lines = [f"\n{where}: none {spread(cell['none_tokens_per_s'], '.1f')} tokens/s"]
    if len(cell["none_processes"]) > 1:
        every = {NONE: cell["none_processes"]} | {name: row["processes"] for name, row in cell["strategies"].items()}
        lines += [f"{name}, processes: {' '.join(f'{each:.3f}' for each in sorted(every[name]))}" for name in every]
    rows = [
        (
            name, spread(row["times_none"]), f"{row['times_none_cpu']['median']:.2f}", f"{row['acceptance']:.1%}",
            f"{row['tokens_per_step']:.2f}", f"{row['rows_per_step']:.2f}",
            f"{row['propose_share']:.1%}", f"{row['equal']:.1%}",
        )
        for name, row in cell["strategies"].items()
    ]  # fmt: skip
    heads = ("strategy", "times none", "CPU", "accepted", "tokens a step", "rows a step", "proposing", "equal")
    return "\n".join([*lines, table(heads, rows)])


if __name__ == "__main__":
    main()
