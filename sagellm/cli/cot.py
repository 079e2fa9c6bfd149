"""`sagellm cot`: answer a question by chains of thought, and let them vote."""

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from sagellm.cli.values import answering, engine_options
from sagellm.core.config import SageConfig

if TYPE_CHECKING:
    from sagellm.accel.cot.controller import CoTAnswer

SHOWN = ("text", "steps")


@click.command()
@click.argument("question")
@engine_options
@click.option("--speculative", default="chain", show_default=True, help="Strategy that guesses tokens, or none.")
@click.option("--samples", type=click.IntRange(1, 128), default=1, show_default=True, help="Chains that vote.")
@click.option("--temperature", type=click.FloatRange(0), help="Temperature [0 for one chain, 0.7 for several].")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the first chain; the next ones count up.")
@click.option("--split", default="line", show_default=True, metavar="line|sentence|MARKER", help="Rule that ends a step.")
@click.option("--max-tokens", type=click.IntRange(1), default=512, show_default=True, help="Most tokens of a chain.")
@click.option("--show", type=click.Choice(SHOWN), default="text", show_default=True, help="The text, or the steps.")
@click.option("--json", "as_json", is_flag=True, help="Print all of the answer as JSON.")
def cot(
    question: str, samples: int, temperature: float | None, seed: int, split: str, max_tokens: int, show: str, as_json: bool,
    **given: Any,
) -> None:  # fmt: skip
    """Answer QUESTION step by step. With several samples print the answer that most chains vote for.

    Exit code 0: answered; 1: the engine could not; 2: misuse.
    """
    with answering(as_json):
        answer = _answer(question, given, samples, temperature, seed, split, max_tokens)
    if as_json:
        click.echo(json.dumps(asdict(answer)))
    elif show == "steps":
        _show_steps(answer)
    else:
        click.echo(answer.text)
        if samples > 1:
            click.echo(f"\n{answer.answer} ({answer.votes[answer.answer]} of {samples} chains)")


def _answer(
    question: str, given: dict[str, Any], samples: int, temperature: float | None, seed: int, split: str, max_tokens: int
) -> "CoTAnswer":  # fmt: skip
    from transformers import AutoTokenizer

    from sagellm.accel.cot.controller import TEMPERATURE, CoTAccelController
    from sagellm.accel.cot.steps import find_split
    from sagellm.core.engines import open_engine
    from sagellm.core.running import SamplingParams
    from sagellm.models import find_model, prepare_model

    find_split(split)  # a wrong one must fail before the engine starts
    config = SageConfig(**{name: value for name, value in given.items() if value not in (None, "none")})
    if temperature is None:
        temperature = TEMPERATURE if samples > 1 else 0.0
    tokenizer = AutoTokenizer.from_pretrained(prepare_model(find_model(config.model)))
    engine = open_engine(config)
    try:
        params = SamplingParams(temperature=temperature, seed=seed)
        return CoTAccelController(engine, tokenizer, split).accelerate_cot(question, samples, max_tokens, params)
    finally:
        engine.close()


def _show_steps(answer: "CoTAnswer") -> None:
    for number, chain in enumerate(answer.chains, 1):
        click.echo(f"chain {number}: {chain.answer}")
        for place, step in enumerate(chain.steps, 1):
            of = f"{len(step.draft_tokens)} guesses, {step.num_accepted} right, {len(step.corrections)} corrected"
            click.echo(f"  {place}. {' '.join(step.text.split())}  ({len(step.token_ids)} tokens; {of})")
    click.echo(f"answer: {answer.answer}, {answer.votes[answer.answer]} of {len(answer.chains)} chains; {answer.stats}")
