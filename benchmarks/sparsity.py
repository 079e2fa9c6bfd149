"""Sparse attention on a real model: the time of a decode step, and what each policy loses at each share of blocks read.

    python -m benchmarks.sparsity [--cells 8x7000] [--share 0.125]
    python -m benchmarks.sparsity --shared 16x4000x200
    python -m benchmarks.sparsity --prompts 2000,7000
    python -m benchmarks.sparsity --memory 48x4000
    python -m benchmarks.sparsity --quality [--plot FILE.png]

Step: relative to dense attention, medians of paired rounds; all contestants get the same prompts and threads, and are asked in
turn. `beyond 64 tokens`: the ratio of times after that of a step behind prompts of 64 tokens is taken off. All layers choose.

With --shared: requests that have some tokens in common, and others of their own, with `--prefix-attention auto` over `off`.
The operator limit reads the common keys once.

With --prompts: first token of one prompt, by policies that choose blocks of prompts.

With --memory: many long requests in a pool that holds twelve of them. `at once`: most requests of a decode step.

Loss: policies of decode steps see prompts that are computed with dense attention, and the question of a task is decoded. For
policies that choose blocks of prompts or give blocks up it is in the prompt. `perplexity`: of 128 tokens behind each
of 8 prompts of 2,048, relative to dense. `fact`: share of greedy answers that find a number which one sentence tells, at a
random depth of a text of 2,048 tokens. `document`: the same with 20 documents, each of which tells its own number twice. Chance
is 0.01%, and 5% for any number of the text.
"""

import contextlib
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import click
import numpy as np

from benchmarks.contestants import Contestant, interleave, paired_ratio, summary
from benchmarks.cpu_engine import build_ours, parse_cells
from benchmarks.limits import Shape, build_limits
from benchmarks.models.real_text import RealText, model_folder
from benchmarks.output import Output, spread, table, with_output
from sagellm.accel.sparsity.base import SUMMARIES
from sagellm.accel.sparsity.policies.sketch import Sketch
from sagellm.accel.sparsity.registry import make_sparsity
from sagellm.core.config import SageConfig
from sagellm.core.errors import SageError
from sagellm.core.figure import new_figure, save_figure
from sagellm.engines.base import SamplingParams
from sagellm.engines.lmdeploy.engine import LMDeployEngine
from sagellm.engines.lmdeploy.sparsity import steps_of
from sagellm.evaluate.forced import answer_after, decode_scores

DENSE, LIMITS, SHORT = "dense", "limits", 64
ASKED_IN_PROMPT = "dense, asked in the prompt"
POLICIES = ("streaming", "quest", "quest-by-layer", "quest-bounds", "sketch", "oracle", "random")
PROMPTS = {
    DENSE: {}, "a_shape": {"sparsity": "a_shape", "sparsity_options": {"share": 0.25}},
    "xattention": {"sparsity": "xattention", "sparsity_options": {"share": 0.25, "threshold": 0.9}},
    "xattention, half": {"sparsity": "xattention", "sparsity_options": {"share": 0.5, "threshold": 1.0}},
}  # fmt: skip
MEMORY = {
    DENSE: {}, "snapkv": {"sparsity": "snapkv", "sparsity_options": {"share": 0.25}},
    "h2o": {"sparsity": "h2o", "sparsity_options": {"share": 0.25}},
}  # fmt: skip
BY_HEAD, BY_LAYER = ({"by_head": by_head, "whole_layers": 0} for by_head in (True, False))
SPEED = {
    DENSE: {}, "streaming": {"sparsity": "streaming"}, "quest": {"sparsity": "quest", "sparsity_options": BY_HEAD},
    "quest, by layer": {"sparsity": "quest", "sparsity_options": BY_LAYER},
    "sketch": {"sparsity": "sketch", "sparsity_options": BY_HEAD},
    "sketch, by layer": {"sparsity": "sketch", "sparsity_options": BY_LAYER}, "dense, kv int8": {"kv_schema": "int8"},
    "streaming, kv int8": {"kv_schema": "int8", "sparsity": "streaming"},
    "quest, kv int8": {"kv_schema": "int8", "sparsity": "quest", "sparsity_options": BY_HEAD},
}  # fmt: skip
VARIANTS = {  # of policies, for the loss
    "quest-by-layer": ("quest", {"by_head": False}), "quest-bounds": ("quest", {"estimate": "bounds"}),
}
NEW_TOKENS = 33
PROMPT, BEHIND, TEXTS = 2048, 129, 8
CONTEXT, ASKED, BATCH = 2048, 32, 8
NAMES = (
    "Paris", "London", "Berlin", "Rome", "Madrid", "Vienna", "Oslo", "Athens", "Dublin", "Lisbon", "Prague", "Warsaw", "Cairo",
    "Delhi", "Tokyo", "Lima", "Havana", "Boston", "Denver", "Miami",
)  # fmt: skip


@click.command()
@click.option("--model", default="smollm2", show_default=True, help="Name or folder.")
@click.option("--quality", is_flag=True, help="Measure the loss instead of the time.")
@click.option("--cells", default="8x7000", show_default=True, help="Batches and lengths of prompts.")
@click.option("--shared", help="Measure requests with a common prefix: requests x common tokens x own tokens.")
@click.option("--prompts", help="Measure the first token of prompts of these lengths.")
@click.option("--memory", help="Measure how many long requests run at once: requests x tokens.")
@click.option("--share", default=0.125, show_default=True, help="Part of the blocks that is read, for the time.")
@click.option("--shares", default="0.0625,0.125,0.25,0.5", show_default=True, help="Parts of the blocks, for the loss.")
@click.option("--policies", default=",".join(POLICIES), show_default=True, help="Policies of the loss: names or module:Class.")
@click.option("--block-size", default=64, show_default=True, help="Tokens of a block, for the loss.")
@click.option("--rounds", default=5, show_default=True, help="Measured rounds of each cell.")
@click.option("--threads", default=2, show_default=True, help="Compute threads of an engine.")
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="Draw the loss over the share as a PNG file.")
@with_output
def main(
    model: str, quality: bool, cells: str, shared: str | None, prompts: str | None, memory: str | None, share: float,
    shares: str, policies: str, block_size: int, rounds: int, threads: int, plot: Path | None, output: Output,
) -> None:
    """Measure, print a table, and write the result."""
    try:
        folder = model_folder(model)
        result: dict[str, Any] = {"model": model, "threads": threads}
        if quality:
            wanted = [float(each) for each in shares.split(",")]
            result |= {"block_size": block_size, "loss": losses(folder, policies.split(","), wanted, block_size, threads)}
        elif shared:
            requests, common, own = (int(part) for part in shared.split("x"))
            result |= {"rounds": rounds, "shared": shared_times(folder, requests, common, own, rounds, threads)}
        elif prompts:
            lengths = [int(each) for each in prompts.split(",")]
            result |= {"rounds": rounds, "prompts": prompt_times(folder, lengths, rounds, threads)}
        elif memory:
            requests, length = (int(part) for part in memory.split("x"))
            result |= {"memory": most_at_once(folder, requests, length, threads)}
        else:
            result |= {"share": share, "rounds": rounds, "cells": times(folder, parse_cells(cells), share, rounds, threads)}
    except (SageError, ValueError) as error:
        raise click.ClickException(str(error)) from None
    result = output.save(result)
    output.say(tables(result))
    if quality and plot is not None:
        draw(result["loss"], plot)
    output.finish(result)


def times(folder: Path, wanted: list[tuple[int, int]], share: float, rounds: int, threads: int) -> list[dict[str, Any]]:
    """Decode steps of each cell, and behind a short prompt in the same batch."""
    sizes = {"context": max(length for _, length in wanted) + 2 * NEW_TOKENS, "batch": max(batch for batch, _ in wanted)}
    text = RealText(folder)
    with contextlib.ExitStack() as stack:
        contestants = [Contestant(LIMITS, build_limits, threads)]
        for name, settings in SPEED.items():
            # Steps alone are timed: prompts come from the cache after the first round.
            own = {"prefix_caching": True, "kv_blocks": 2 * sizes["batch"] * (sizes["context"] // 64 + 1)} | settings
            if "sparsity" in own:
                own["sparsity_options"] = {"share": share} | own.get("sparsity_options", {})
            contestants.append(Contestant(name, build_ours, str(folder), threads, sizes, "auto", own))
        for contestant in contestants:
            stack.callback(contestant.close)
        found = []
        for batch, length in wanted:
            steps: dict[int, dict[str, list[float]]] = {}
            for size in (SHORT, length):
                prompts = [text.prose(size, batch * 1000 + size, number) for number in range(batch)]
                steps[size], speeds = _steps_of(contestants, prompts, rounds)
            dense, short = steps[length][DENSE], steps[SHORT]
            beyond = {name: [a - b for a, b in zip(values, short[name], strict=True)] for name, values in steps[length].items()}
            found.append({
                "batch": batch, "length": length,
                "step_s": {name: summary(values) for name, values in steps[length].items()},
                "step": {name: paired_ratio(values, dense) for name, values in steps[length].items()},
                "beyond_short": {name: paired_ratio(values, beyond[DENSE]) for name, values in beyond.items()},
                "bandwidth_gb_s": float(np.median([speed.bandwidth for speed in speeds])) / 1e9,
            })  # fmt: skip
    return found


def _steps_of(
    contestants: list[Contestant], prompts: list[list[int]], rounds: int
) -> tuple[dict[str, list[float]], list[Any]]:
    """Seconds of a decode step by contestant and round, and the limits of the machine in each round."""
    request = {"do": "times", "prompts": prompts, "new_tokens": NEW_TOKENS}
    interleave(contestants, request, 1)
    answers = interleave(contestants, request, rounds)
    speeds = answers.pop(LIMITS)
    return {name: [_step_s(times) for times in every] for name, every in answers.items()}, speeds


def shared_times(folder: Path, requests: int, common: int, own: int, rounds: int, threads: int) -> dict[str, Any]:
    """Decode steps of requests that begin with the same tokens."""
    text, shape = RealText(folder), Shape.read(folder)
    sizes = {"context": common + own + 2 * NEW_TOKENS, "batch": requests}
    blocks = common // 64 + 2 * requests * (own // 64 + 3)
    with contextlib.ExitStack() as stack:
        contestants = [Contestant(LIMITS, build_limits, threads)]
        for name in ("off", "auto"):
            settings = {"prefix_caching": True, "kv_blocks": blocks, "prefix_attention": name}
            contestants.append(Contestant(name, build_ours, str(folder), threads, sizes, "auto", settings))
        for contestant in contestants:
            stack.callback(contestant.close)
        first = text.prose(common, 1)
        prompts = [first + text.prose(own, 2, number) for number in range(requests)]
        steps, speeds = _steps_of(contestants, prompts, rounds)
        limits = [shape.decode_s(requests, common + own + NEW_TOKENS // 2, speed, common) for speed in speeds]
    return {
        "requests": requests, "common": common, "own": own,
        "step_s": {name: summary(values) for name, values in steps.items()},
        "step": paired_ratio(steps["auto"], steps["off"]), "over_limit": paired_ratio(steps["auto"], limits),
        "bandwidth_gb_s": float(np.median([speed.bandwidth for speed in speeds])) / 1e9,
    }  # fmt: skip


def prompt_times(folder: Path, lengths: list[int], rounds: int, threads: int) -> list[dict[str, Any]]:
    """First tokens of prompts, of which no part is cached."""
    text = RealText(folder)
    sizes = {"context": max(lengths) + 64, "batch": 1}
    with contextlib.ExitStack() as stack:
        contestants = []
        for name, settings in PROMPTS.items():
            own = {"prefix_caching": False, "kv_blocks": max(lengths) // 64 + 4, "max_prefill_tokens": max(lengths) + 64}
            contestants.append(Contestant(name, build_ours, str(folder), threads, sizes, "auto", own | settings))
        for contestant in contestants:
            stack.callback(contestant.close)
        found = []
        for length in lengths:
            request = {"do": "times", "prompts": [text.prose(length, 3, length)], "new_tokens": 1}
            interleave(contestants, request, 1)
            answers = interleave(contestants, request, rounds)
            first = {name: [times[0][0] for times in every] for name, every in answers.items()}
            found.append({
                "length": length, "first_token_s": {name: summary(values) for name, values in first.items()},
                "first_token": {name: paired_ratio(values, first[DENSE]) for name, values in first.items()},
            })  # fmt: skip
    return found


def most_at_once(folder: Path, requests: int, length: int, threads: int) -> list[dict[str, Any]]:
    """Long requests in a pool that holds twelve of them: how many decode at once, and how many are sent back or lost."""
    text, new_tokens, block_size = RealText(folder), 64, 16
    prompts = [text.prose(length, 4, number) for number in range(requests)]
    blocks = 12 * -(-(length + new_tokens) // block_size)
    rows = []
    for name, settings in MEMORY.items():
        with tempfile.TemporaryDirectory() as temporary:
            record = Path(temporary) / "events.jsonl"
            config = SageConfig(
                device="cpu", threads=threads, context_length=length + new_tokens + 64, max_batch_size=requests,
                block_size=block_size, kv_blocks=blocks, prefix_caching=False, record=record, **settings,
            )  # fmt: skip
            engine = LMDeployEngine(config, folder)
            try:
                start_s = time.perf_counter()
                done = engine.generate(prompts, SamplingParams(max_new_tokens=new_tokens, ignore_eos=True))
                seconds = time.perf_counter() - start_s
            finally:
                engine.close()
            lines = [json.loads(line) for line in record.read_text().splitlines()]
        decoded = [line["requests"] for line in lines if line["event"] == "step" and line["phase"] == "decode"]
        rows.append({
            "policy": name, "requests": requests, "length": length, "blocks": blocks, "at_once": max(decoded),
            "finished": sum(len(one.token_ids) == new_tokens for one in done),
            "preempted": sum(line["event"] == "preempt" for line in lines), "seconds": seconds,
        })  # fmt: skip
    return rows


def _step_s(times: list[list[float]]) -> float:
    return (max(row[-1] for row in times) - max(row[0] for row in times)) / (NEW_TOKENS - 1)


def losses(folder: Path, policies: list[str], shares: list[float], block_size: int, threads: int) -> list[dict[str, Any]]:
    """Loss of each policy and share. Those of decode steps share an engine, whose prompts are computed once."""
    kinds = {policy: make_sparsity(VARIANTS.get(policy, (policy,))[0]) for policy in policies}
    of_steps = [policy for policy, kind in kinds.items() if kind.selects]
    rows = []
    if of_steps:
        rows += step_losses(folder, of_steps, shares, block_size, threads)
    if others := [policy for policy in policies if policy not in of_steps]:
        rows += prompt_losses(folder, others, shares, block_size, threads)
    return rows


def _loss_config(block_size: int, threads: int, num_tokens: int, **settings: Any) -> SageConfig:
    return SageConfig(
        device="cpu", dtype="bfloat16", threads=threads, block_size=block_size, context_length=CONTEXT + PROMPT,
        max_batch_size=BATCH, kv_blocks=num_tokens // block_size, **settings,
    )  # fmt: skip


class AllSummaries(Sketch):
    """Has the engine keep the summaries of keys that any policy asks for."""

    summaries = SUMMARIES


def step_losses(folder: Path, policies: list[str], shares: list[float], block_size: int, threads: int) -> list[dict[str, Any]]:
    """Policies of decode steps, in one engine in turn: prompts are computed once, by dense attention."""
    text = RealText(folder)
    num_tokens = TEXTS * (PROMPT + BEHIND) + 2 * (ASKED + BATCH) * CONTEXT
    engine = LMDeployEngine(_loss_config(block_size, threads, num_tokens, sparsity=f"{__spec__.name}:AllSummaries"), folder)
    steps = steps_of(engine.engine.executor.model_agent.cache_config)
    rows = []
    try:
        for policy, share in [(DENSE, 1.0), *((policy, share) for policy in policies for share in shares)]:
            name, options = VARIANTS.get(policy, ("random" if policy == DENSE else policy, {}))
            steps.exchange(make_sparsity(name, share=share, **{"min_blocks": 2} | options))
            before = steps.report()
            row: dict[str, Any] = {"policy": policy, "share": share, "loss": text_loss(engine, text)}
            row |= {task: found(engine, text, task) for task in ("fact", "document")}
            report = steps.report()
            _check(policy, report)
            row["read"] = (report["read"] - before["read"]) / (report["held"] - before["held"])
            rows.append(row)
            click.echo(f"{policy} {share:g}: {row}", err=True)
    finally:
        engine.close()
    return rows


def prompt_losses(
    folder: Path, policies: list[str], shares: list[float], block_size: int, threads: int
) -> list[dict[str, Any]]:
    """Policies of prompts, and those that give up blocks. Each has an engine of its own, without a prefix cache."""
    text = RealText(folder)
    rows = []
    for policy, share in [(ASKED_IN_PROMPT, 1.0), *((policy, share) for policy in policies for share in shares)]:
        settings: dict[str, Any] = {"prefix_caching": False, "max_prefill_tokens": PROMPT}
        if policy != ASKED_IN_PROMPT:
            settings |= {"sparsity": policy, "sparsity_options": {"share": share}}
        engine = LMDeployEngine(_loss_config(block_size, threads, (TEXTS + 1) * (PROMPT + 2 * BEHIND), **settings), folder)
        try:
            row: dict[str, Any] = {"policy": policy, "share": share, "loss": text_loss(engine, text), "read": 1.0}
            row |= {task: found(engine, text, task, in_prompt=True) for task in ("fact", "document")}
            if policy != ASKED_IN_PROMPT:
                report = engine.hooks.report()["sparsity"]
                _check(policy, report)
                if report["prompts"]:
                    row["read"] = report["prompt_read"] / report["prompt_held"]
                else:
                    row["read"] = make_sparsity(policy, share=share).budget(PROMPT // block_size) / (PROMPT // block_size)
        finally:
            engine.close()
        rows.append(row)
        click.echo(f"{policy} {share:g}: {row}", err=True)
    return rows


def _check(policy: str, report: dict[str, Any]) -> None:
    if report["fault"]:
        raise click.ClickException(f"{policy}: {report['fault']}")


def text_loss(engine: LMDeployEngine, text: RealText) -> float:
    """Mean negative log-probability of the tokens behind long prompts, in nats."""
    pieces = [text.prose(PROMPT + BEHIND, 77, number) for number in range(TEXTS)]
    every = decode_scores(engine, [piece[:PROMPT] for piece in pieces], [piece[PROMPT:] for piece in pieces])
    targets = [piece[PROMPT + 1 :] for piece in pieces]  # the first one is of the prompt's step
    return float(np.mean([-scores[np.arange(1, BEHIND), one].mean() for scores, one in zip(every, targets, strict=True)]))


def found(engine: LMDeployEngine, text: RealText, task: str, in_prompt: bool = False) -> float:
    """Share of answers that are right. `in_prompt`: whether the question is a part of the prompt, else it is decoded."""
    asked = [make_task(text, task, number) for number in range(ASKED)]
    if in_prompt:
        asked = [(prompt + question, [], answer) for prompt, question, answer in asked]
    right = 0
    for first in range(0, ASKED, BATCH):
        part = asked[first : first + BATCH]
        answers = answer_after(engine, [one[0] for one in part], [one[1] for one in part], max(len(one[2]) for one in part))
        right += sum(answer[: len(one[2])] == one[2] for answer, one in zip(answers, part, strict=True))
    return right / ASKED


def make_task(text: RealText, task: str, number: int) -> tuple[list[int], list[int], list[int]]:
    """Return (prompt, question, answer) as tokens. The question is decoded, so that its queries choose blocks too."""
    chance = random.Random(number)
    names = chance.sample(NAMES, 20 if task == "document" else 1)
    secrets = {name: str(chance.randrange(1000, 10_000)) for name in names}
    filler = text.prose(CONTEXT, 500, number)
    told = "\n{0} is special for the number {1}, {0} likes {1}.\n" if task == "document" else "\nThe number of {0} is {1}.\n"
    facts = [text.encode(told.format(name, secret)) for name, secret in secrets.items()]
    times = 2 if task == "document" else 1
    room = (CONTEXT - times * sum(map(len, facts)) - 64) // len(facts)
    prompt: list[int] = []
    for place, fact in enumerate(facts):
        document, cut = filler[place * room : (place + 1) * room], chance.randrange(room)
        prompt += document[:cut] + fact + document[cut:] + (fact if times == 2 else [])
    name = names[number % len(names)]
    question = told.format(name, "{}").split(" {}")[0]
    return prompt, text.encode(question), text.encode(f" {secrets[name]}")


def tables(result: dict[str, Any]) -> str:
    """The result as text."""
    if "prompts" in result:
        text = ""
        for cell in result["prompts"]:
            rows = [
                [name, f"{taken['median']:.2f}", spread(cell["first_token"][name])]
                for name, taken in cell["first_token_s"].items()
            ]
            text += table([f"{cell['length']} tokens", "first token s", "x dense"], rows) + "\n"
        return text
    if "memory" in result:
        heads = ["policy", "requests", "tokens", "blocks", "at once", "finished", "sent back", "seconds"]
        rows = [
            [row["policy"], row["requests"], row["length"], row["blocks"], row["at_once"], row["finished"], row["preempted"],
             f"{row['seconds']:.0f}"]
            for row in result["memory"]
        ]  # fmt: skip
        return table(heads, rows)
    if "loss" in result:
        every = result["loss"]
        rows = [
            [row["policy"], f"{row['share']:g}", f"{row['read']:.3f}", f"{_worse(row, every):+.2f}%", f"{row['fact']:.2f}",
             f"{row['document']:.2f}"]
            for row in every
        ]  # fmt: skip
        return table(["policy", "share", "read", "perplexity", "fact", "document"], rows)
    if "shared" in result:
        row = result["shared"]
        steps = [f"{1e3 * row['step_s'][name]['median']:.1f}" for name in ("off", "auto")]
        heads = ["requests", "common", "own", "off ms", "auto ms", "x off", "over limit"]
        rows = [[row["requests"], row["common"], row["own"], *steps, spread(row["step"]), spread(row["over_limit"])]]
        return table(heads, rows)
    text = ""
    for cell in result["cells"]:
        rows = [
            [name, f"{1e3 * step['median']:.1f}", spread(cell["step"][name]), spread(cell["beyond_short"][name])]
            for name, step in cell["step_s"].items()
        ]
        heads = [f"{cell['batch']}x{cell['length']}", "step ms", "x dense", "beyond 64 tokens"]
        text += table(heads, rows) + "\n"
    return text


def _worse(row: dict[str, Any], rows: list[dict[str, Any]]) -> float:
    """Perplexity over that of the dense attention that comes before it, in percent."""
    dense = [one for one in rows[: rows.index(row) + 1] if one["policy"] in (DENSE, ASKED_IN_PROMPT)][-1]
    return 100 * float(np.exp(row["loss"] - dense["loss"]) - 1)


def draw(rows: list[dict[str, Any]], file: Path) -> None:
    """Draw what each policy loses over the share of blocks that it reads."""
    figure = new_figure(12, 3.6)
    axes = figure.subplots(1, 3)
    dense = rows[0]
    for policy in dict.fromkeys(row["policy"] for row in rows if row["policy"] not in (DENSE, ASKED_IN_PROMPT)):
        own = [row for row in rows if row["policy"] == policy]
        shares = [row["read"] for row in own]
        axes[0].plot(shares, [_worse(row, rows) for row in own], "o-", label=policy)
        axes[1].plot(shares, [row["fact"] for row in own], "o-", label=policy)
        axes[2].plot(shares, [row["document"] for row in own], "o-", label=policy)
    for axis, name, level in zip(axes, ("perplexity, % over dense", "fact found", "document found"),
                                 (0.0, dense["fact"], dense["document"]), strict=True):  # fmt: skip
        axis.axhline(level, color="gray", linewidth=0.8)
        axis.set(xlabel="blocks read", title=name, xscale="log")
    axes[0].set_yscale("symlog", linthresh=1)
    axes[0].legend()
    save_figure(figure, file)


if __name__ == "__main__":
    main()
