"""`sagellm sot`: answer a question with a plan whose points are written side by side."""

import contextlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sagellm.cli.values import answering, engine_options
from sagellm.core.config import SageConfig

if TYPE_CHECKING:
    from sagellm.accel.sot.results import SoTAnswer
    from sagellm.cli.sot_figure import Timeline

SHOWN = ("text", "tree")


@click.command()
@click.argument("question")
@engine_options
@click.option("--speculative", help="Strategy that guesses tokens, in the plan and in the points.")
@click.option("--max-parallel", type=click.IntRange(1, 128), default=16, show_default=True, help="Points written at once.")
@click.option("--max-tokens", type=click.IntRange(1), default=512, show_default=True, help="Most tokens of a point.")
@click.option("--workers", type=click.IntRange(0, 64), default=0, show_default=True, help="Processes that write points too.")
@click.option("--always-plan", is_flag=True, help="Do not let the model answer without a plan.")
@click.option("--show", type=click.Choice(SHOWN), default="text", show_default=True, help="The text, or the points as a tree.")
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="Draw the answer over time: .png, .svg or .pdf.")
@click.option("--json", "as_json", is_flag=True, help="Print all of the answer as JSON.")
def sot(
    question: str, max_parallel: int, max_tokens: int, workers: int, always_plan: bool, show: str, plot: Path | None,
    as_json: bool, **given: Any,
) -> None:  # fmt: skip
    """Answer QUESTION as a plan of 2 to 12 points that are written side by side.

    Exit code 0: answered; 1: the engine could not; 2: misuse.
    """
    options = {"max_new_tokens": max_tokens, "max_parallel": max_parallel}
    with answering(as_json):
        answer, tokenizer, timeline = _answer(question, given, not always_plan, options, workers)
        if plot is not None:
            from sagellm.cli.sot_figure import draw

            draw(timeline, question, plot)
    if as_json:
        click.echo(json.dumps(_plain(answer)))
    elif show == "tree":
        _show_tree(question, answer, tokenizer)
    else:
        click.echo(answer.text)


def _answer(
    question: str, given: dict[str, Any], may_be_direct: bool, options: dict[str, int], workers: int
) -> tuple["SoTAnswer", Any, "Timeline"]:  # fmt: skip
    """Return the answer, the tokenizer of its tokens, and when they came."""
    from transformers import AutoTokenizer

    from sagellm.accel.sot.pipeline import SpecSoT
    from sagellm.accel.sot.workers import open_group
    from sagellm.cli.sot_figure import Timeline
    from sagellm.core.engines import open_engine
    from sagellm.models import find_model, prepare_model

    config = SageConfig(**{name: value for name, value in given.items() if value is not None})
    tokenizer = AutoTokenizer.from_pretrained(prepare_model(find_model(config.model)))
    with contextlib.ExitStack() as stack:
        if workers:
            engine, group, _ = stack.enter_context(open_group(config, workers))
        else:
            engine, group = open_engine(config), None
            stack.callback(engine.close)
        timeline = Timeline()
        sot = SpecSoT(engine, tokenizer, may_be_direct, group=group)
        return sot.generate(question, **options, listener=timeline), tokenizer, timeline


def _plain(answer: "SoTAnswer") -> dict[str, Any]:
    from dataclasses import asdict

    return asdict(answer)


def _show_tree(question: str, answer: "SoTAnswer", tokenizer: Any) -> None:
    from rich import print as show
    from rich.markup import escape
    from rich.tree import Tree

    from sagellm.accel.sot.skeleton import lead

    tree = Tree(f"{escape(question)} ({answer.mode}, {answer.stats['total_s']:.2f} s)")
    if answer.mode != "plan":
        tree.add(escape(f"{answer.error_msg}\n{answer.text}".strip()))
    for task in answer.tasks:
        tokens = answer.branches[task.branch_id]
        branch = tree.add(f"{task.branch_id + 1}. {escape(task.title)} ({len(tokens)} tokens)")
        branch.add(escape(lead(task) + tokenizer.decode(tokens, skip_special_tokens=True)))
    show(tree)
