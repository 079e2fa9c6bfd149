"""Speculative strategies side by side: the same requests, the same answers, and what the guesses were worth.

    .venv/bin/python examples/speculative_decoding.py [--new 128] [--batch 4] [--prompt TEXT] [--strategy mine:Mine]

Each prompt is asked once; then a second time behind its answer, as by somebody who wants his text back with a change in it. The
second answer is what is measured: tokens a second of decoding, from when the last request has its first token, the median of
some rounds. Each round has other prompts, of which the demo model knows the answers; of prompts that come again the suffix
strategy remembers what was said. Strategies are measured one after the other, so the machine should have nothing else to do;
`python -m benchmarks.speculate` has them take turns.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import click

from sagellm.core.config import SageConfig
from sagellm.demo_model import DemoRecipe, ensure_demo_model
from sagellm.demo_model.corpus import build_corpus
from sagellm.engines.base import Generation, SamplingParams
from sagellm.engines.lmdeploy.engine import LMDeployEngine

LOOKAHEAD, DRAFT_LOOKAHEAD = 8, 4  # each guess of a draft model costs a pass of it
HEAD = ("strategy", "tokens/s", "times none", "drafted", "accepted", "acceptance", "tokens a step", "equal")
Rounds = Sequence[Sequence[Generation]]
COLUMNS = "{:<16}{:>10}{:>12}{:>9}{:>10}{:>12}{:>14}{:>10}"


@click.command()
@click.option("--new", default=128, type=click.IntRange(2), show_default=True, help="Tokens of each answer.")
@click.option("--batch", default=4, type=click.IntRange(1), show_default=True, help="Requests at once.")
@click.option("--prompt", "prompts", multiple=True, help="Again for more; asked in turn. Default: the demo model's own.")
@click.option("--rounds", default=3, type=click.IntRange(1), show_default=True)
@click.option("--strategy", "strategies", multiple=True, default=("ngram", "suffix", "dynamic:suffix"), help="Again for more.")
@click.option("--model", type=click.Path(path_type=Path), help="Local Hugging Face folder. Default: the demo model.")
@click.option("--draft", type=click.Path(path_type=Path), help="Its draft model. Default: the demo model's, or none.")
@click.option("--threads", type=click.IntRange(1), help="Of the CPU device [all cores].")
def main(
    new: int, batch: int, prompts: Sequence[str], rounds: int, strategies: Sequence[str], model: Path | None,
    draft: Path | None, threads: int | None,
) -> None:  # fmt: skip
    """Ask the same of every strategy, and print a table."""
    if model is None:
        click.echo("The demo model and its draft are trained once, which takes a minute or two.", err=True)
        model, draft = ensure_demo_model(), draft or ensure_demo_model(recipe=DemoRecipe().draft())
    options: dict[str, dict[str, Any]] = {name: {"lookahead": LOOKAHEAD} for name in strategies}
    if draft is not None:
        options["draft"] = {"lookahead": DRAFT_LOOKAHEAD, "model": str(draft)}
    ask = SamplingParams(max_new_tokens=new, stop_token_ids=(end_of_text(model),))
    common = SageConfig(model=model, max_batch_size=batch, threads=threads)

    prompts = prompts or [chat.user for chat in build_corpus(DemoRecipe()).chats]
    with LMDeployEngine(common) as engine:
        seconds = []
        for start in range(0, rounds * batch, batch):
            places = range(start, start + batch)
            firsts = [[{"role": "user", "content": prompts[place % len(prompts)]}] for place in places]
            said = engine.generate([to_tokens(model, first) for first in firsts], ask)
            texts = [to_text(model, answer.token_ids) for answer in said]
            seconds.append([
                to_tokens(model, [*first, {"role": "assistant", "content": text}, *first])
                for first, text in zip(firsts, texts, strict=True)
            ])  # fmt: skip
        none = [engine.generate(second, ask) for second in seconds]
    click.echo(COLUMNS.format(*HEAD))
    show("none", none, none, {})
    for name, values in options.items():
        config = common.model_copy(update={"speculative": name, "speculative_options": values})
        with LMDeployEngine(config) as engine:
            engine.generate([[5] * 64] * batch, SamplingParams(max_new_tokens=8, ignore_eos=True))  # the first steps are slow
            before = engine.hooks.report()["speculation"]
            found = [engine.generate(second, ask) for second in seconds]
            after = engine.hooks.report()["speculation"]
        show(name, found, none, {key: after[key] - before[key] for key in ("drafted", "accepted", "sequences")})


def to_tokens(model: Path, chat: list[dict[str, str]]) -> list[int]:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model).apply_chat_template(chat, add_generation_prompt=True)


def end_of_text(model: Path) -> int:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model).eos_token_id


def to_text(model: Path, tokens: Sequence[int]) -> str:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model).decode(tokens, skip_special_tokens=True)


def to_ids(rounds: Rounds) -> list[tuple[int, ...]]:
    return [answer.token_ids for answers in rounds for answer in answers]


def tokens_per_s(answers: Sequence[Generation]) -> float:
    """Of decoding alone: from when every request has its first token."""
    begin_s, end_s = max(answer.token_s[0] for answer in answers), max(answer.token_s[-1] for answer in answers)
    return sum(at > begin_s for answer in answers for at in answer.token_s) / (end_s - begin_s)


def show(name: str, found: Rounds, none: Rounds, counts: dict[str, int]) -> None:
    """One row. `counts`: guesses, right ones, and decode steps summed over their sequences."""
    drafted, accepted, steps = (counts.get(key, 0) for key in ("drafted", "accepted", "sequences"))
    speeds = [tokens_per_s(answers) for answers in found]
    times = median(ours / tokens_per_s(theirs) for ours, theirs in zip(speeds, none, strict=True))
    is_equal = to_ids(found) == to_ids(none)
    click.echo(
        COLUMNS.format(
            name, f"{median(speeds):.1f}", f"{times:.2f}", drafted, accepted,
            f"{accepted / drafted:.1%}" if drafted else "-", f"{1 + accepted / steps:.2f}" if steps else "1.00",
            "yes" if is_equal else "no",
        )
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
