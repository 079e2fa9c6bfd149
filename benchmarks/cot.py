"""Chains of thought with guesses beside none: tokens a second of the samples of one question, first and again with new seeds.

    python -m benchmarks.cot [--model smollm2] [--samples 8] [--questions 4] [--passes 2] [--same-seeds] [--out FILE]

Prompts are `SHOTS` worked examples and a question. Both contestants write the same samples with the same seeds: one engine
without guesses, whose samples are one batch that shares the prompt, and one with guesses. Each pass asks every question with
new seeds, or with those of the first pass, and each round has other questions. The second engine knows all chains that it has
written. Each sampling has engines of its own. Greedy chains, asked twice, are the upper end.
"""

import time
from typing import Any

import click

from benchmarks.contestants import Contestant, paired_ratio, summary
from benchmarks.models.real_text import model_folder
from benchmarks.output import Output, spread, table, with_output

SHOTS = (
    ("Nora has 9 pencils. She finds 5 more and gives 4 to her brother. How many pencils does she have?",
     "Nora has 9 pencils.\nShe finds 5 more, so she has 9 + 5 = 14 pencils.\n"
     "She gives 4 to her brother, so she has 14 - 4 = 10 pencils.\nThe answer is 10."),
    ("A box holds 6 eggs. A baker buys 7 boxes and uses 20 eggs. How many eggs are left?",
     "A box holds 6 eggs.\nThe baker buys 7 boxes, so he has 7 * 6 = 42 eggs.\n"
     "He uses 20 eggs, so 42 - 20 = 22 eggs are left.\nThe answer is 22."),
    ("A bus has 30 seats. At the first stop 12 people get on, at the second stop 9 more. How many seats are free?",
     "The bus has 30 seats.\nAt both stops 12 + 9 = 21 people get on.\nSo 30 - 21 = 9 seats are free.\nThe answer is 9."),
    ("Sam reads 15 pages a day. His book has 120 pages. How many days does he need?",
     "Sam reads 15 pages a day.\nThe book has 120 pages.\nSo he needs 120 / 15 = 8 days.\nThe answer is 8."),
)  # fmt: skip
QUESTIONS = (
    "A farmer has 12 cows and buys 7 more. Each cow gives 9 liters of milk a day. How many liters does he get in a day?",
    "A train travels 60 miles an hour for 3 hours and then 45 miles an hour for 2 hours. How far does it travel?",
    "Lena buys 4 notebooks for 3 dollars each and 6 pens for 2 dollars each. She pays with 50 dollars. How much is her change?",
    "A shop sells 15 apples in the morning and twice as many in the afternoon. An apple costs 2 dollars. What does it earn?",
    "A class has 28 children. Each child needs 3 sheets of paper. A pack has 12 sheets. How many packs does the class need?",
    "Tom runs 4 miles on each of 5 days and 7 miles on Sunday. How many miles does he run in a week?",
    "A tank holds 200 liters. A pump fills 15 liters a minute, and 5 liters a minute leak. How many minutes until it is full?",
    "Ana has 3 times as many stamps as Ben. Ben has 14 stamps. Ana gives away 8. How many stamps do they have together?",
    "A bakery bakes 24 rolls an hour for 6 hours. It sells 130 rolls. How many rolls are left?",
    "A ticket costs 8 dollars, and children pay half. What do 2 adults and 3 children pay?",
    "A garden is 12 meters long and 7 meters wide. How many meters of fence does it need?",
    "Paul saves 25 dollars a month. A bicycle costs 310 dollars, and he has 60 dollars. How many months must he save?",
)
SAMPLINGS = {"temperature 0.7": (0.7, 0), "temperature 0.5, top 40": (0.5, 40)}  # both of Wang et al., 2022
SETTINGS = {"kv_blocks": 400, "max_batch_size": 32, "context_length": 2048, "block_size": 64}


@click.command()
@click.option("--model", default="smollm2", show_default=True, help="Name or folder of a model with a chat template.")
@click.option("--samples", default=8, show_default=True, help="Chains of a question.")
@click.option("--questions", default=4, show_default=True, help="Questions of a round.")
@click.option("--passes", default=2, show_default=True, help="Passes over the questions of a round, each with new seeds.")
@click.option("--rounds", default=3, show_default=True, help="Rounds, each with other questions.")
@click.option("--tokens", default=160, show_default=True, help="Most tokens of a chain.")
@click.option("--threads", default=2, show_default=True, help="Compute threads of an engine.")
@click.option("--same-seeds", is_flag=True, help="Passes after the first have its seeds.")
@click.option("--strategy", default="chain", show_default=True, help="Strategy that guesses.")
@with_output
def main(
    model: str, samples: int, questions: int, passes: int, rounds: int, tokens: int, threads: int, same_seeds: bool,
    strategy: str, output: Output,
) -> None:  # fmt: skip
    """Measure, print a table, and write the result."""
    folder = str(model_folder(model))
    works = {name: (samples, temperature, top_k) for name, (temperature, top_k) in SAMPLINGS.items()} | {"greedy": (1, 0.0, 0)}
    found: dict[str, list[dict[str, list[dict[str, Any]]]]] = {}
    for work, (count, temperature, top_k) in works.items():
        engines = [Contestant(name, build, folder, threads, name) for name in ("none", strategy)]
        try:
            found[work] = [{each.name: [] for each in engines} for _ in range(passes)]
            for turn in range(rounds):
                places = [(turn * questions + number) % len(QUESTIONS) for number in range(questions)]
                for number in range(passes):
                    request = {
                        "questions": places, "samples": count, "tokens": tokens, "temperature": temperature, "top_k": top_k,
                        "seed": 10_000 * turn + (0 if same_seeds else 1000 * number),
                    }  # fmt: skip
                    for each in engines if (turn + number) % 2 == 0 else reversed(engines):
                        found[work][number][each.name].append(each.ask(request))
        finally:
            for each in engines:
                each.close()
        result = output.save({
            "model": model, "samples": samples, "questions": questions, "rounds": rounds, "tokens": tokens, "threads": threads,
            "strategy": strategy, "same_seeds": same_seeds,
            "work": {work: [_figures(told, strategy) for told in every] for work, every in found.items()},
        })  # fmt: skip
    rows = [
        (
            work, str(number + 1), spread(told["none_tokens_per_s"], ".0f"), spread(told["times_none"]),
            f"{told['acceptance']:.0%}", f"{told['tokens_per_pass']:.2f}", f"{told['equal']:.1%}",
        )
        for work, every in result["work"].items()
        for number, told in enumerate(every)
    ]  # fmt: skip
    output.say(table(("chains", "pass", "none, tokens/s", "times none", "right guesses", "tokens a pass", "equal"), rows))
    output.finish(result)


def build(model: str, threads: int, strategy: str) -> Any:
    """Answers a request of `main` with tokens, seconds and counts."""
    from transformers import AutoTokenizer

    from sagellm.accel.cot.controller import CoTAccelController
    from sagellm.core.config import SageConfig
    from sagellm.core.running import SamplingParams
    from sagellm.engines.lmdeploy.engine import LMDeployEngine

    tokenizer = AutoTokenizer.from_pretrained(model)
    speculative = {} if strategy == "none" else {"speculative": strategy}
    engine = LMDeployEngine(SageConfig(device="cpu", model=model, threads=threads, **SETTINGS, **speculative))
    engine.generate([[5] * 300] * 8, SamplingParams(8, ignore_eos=True))
    controller = CoTAccelController(engine, tokenizer)
    shown = [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(sum(SHOTS, ()))]

    def answer(request: dict[str, Any]) -> Any:
        chains, stats, start_s = [], [], time.perf_counter()
        for place in request["questions"]:
            params = SamplingParams(
                temperature=request["temperature"], top_k=request["top_k"], seed=request["seed"] + 100 * place
            )
            asked = [*shown, {"role": "user", "content": QUESTIONS[place]}]
            told = controller.accelerate_cot(asked, request["samples"], request["tokens"], params)
            chains += [each.token_ids for each in told.chains]
            stats.append(told.stats)
        seconds = time.perf_counter() - start_s
        total = {name: sum(each[name] for each in stats) for name in ("tokens", "drafted", "accepted", "passes")}
        return total | {"chains": chains, "tokens_per_s": total["tokens"] / seconds}

    answer.close = engine.close  # type: ignore[attr-defined]
    return answer


def _figures(told: dict[str, list[dict[str, Any]]], strategy: str) -> dict[str, Any]:
    """Return the figures of one pass, over all rounds."""
    ours, none = told[strategy], told["none"]
    total = {name: sum(each[name] for each in ours) for name in ("tokens", "drafted", "accepted", "passes")}
    pairs = [pair for one, other in zip(ours, none, strict=True) for pair in zip(one["chains"], other["chains"], strict=True)]
    speeds = [[each["tokens_per_s"] for each in every] for every in (ours, none)]
    return {
        "none_tokens_per_s": summary(speeds[1]), "tokens_per_s": summary(speeds[0]), "times_none": paired_ratio(*speeds),
        "acceptance": total["accepted"] / max(1, total["drafted"]), "tokens_per_pass": total["tokens"] / total["passes"],
        "equal": sum(one == other for one, other in pairs) / len(pairs),
    }  # fmt: skip


if __name__ == "__main__":
    main()
