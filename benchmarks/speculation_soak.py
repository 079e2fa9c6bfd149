"""Many mixed requests through engines that guess, some of them broken off: nothing may be lost.

    python -m benchmarks.speculation_soak [--requests 10000] [--strategies suffix,ngram,dynamic:suffix,draft] [--out FILE]

A tiny model in float32 on the CPU engine mostly says one token after another, and otherwise what the whole text before
decides. So many guesses from text are right, and a wrong key shows. The draft model is the target itself. The pool is so small
that requests preempt each other. Prompts share beginnings and repeat themselves, greedy and sampled. Clients break off a fifth
of them. Checked for each strategy:

- finished answers equal those of the same engine without guesses;
- every block is free or cached, and held by no request;
- no text of an ended request is left.
"""

import asyncio
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import click
import psutil

from benchmarks.output import Output, json_text, with_output
from benchmarks.speculation.chain_model import successors, write_chain_model

AT_ONCE, PART = 24, 500
BROKEN_OFF = 0.2
QUIET = 0.08  # of the layers, see `write_chain_model`
VOCAB_SIZE, FIRST = 800, 300  # tokens from `FIRST` on follow each other in a cycle
SIZES = {"device": "cpu", "threads": 1, "block_size": 16, "kv_blocks": 48, "max_batch_size": 16}
STRATEGIES = "suffix,ngram,dynamic:suffix,draft"
BUDGET = 0.95  # of `dynamic`, which guesses little where steps are as cheap as this model's

Job = tuple[list[int], Any, int | None]  # prompt, what is asked for, tokens after which the client leaves


@click.command()
@click.option(
    "--requests", type=click.IntRange(10), default=10_000, show_default=True,
    help="Requests for each strategy.",
)
@click.option(
    "--strategies", default=STRATEGIES, show_default=True, metavar="NAME,...",
    help="Strategies, separated by commas.",
)
@click.option("--options", default="{}", metavar="JSON", help="Options by strategy.")
@click.option("--seed", default=0, show_default=True, help="Seed of the workload.")
@with_output
def main(requests: int, strategies: str, options: str, seed: int, output: Output) -> None:
    """Run, print, and write the result; exit code 1: something was lost or differs."""
    with tempfile.TemporaryDirectory() as scratch:
        runs = soak(Path(scratch), requests, strategies.split(","), json.loads(options), seed, output)
    output.finish({"requests": requests, "runs": runs})
    if any(run[name] for run in runs for name in ("differences", "active_blocks", "lost_blocks", "texts_left", "faults")):
        raise SystemExit(1)


def soak(
    scratch: Path, requests: int, strategies: list[str], options: dict[str, dict[str, Any]], seed: int,
    output: Output,
) -> list[dict[str, Any]]:
    """One result for each strategy, printed when it is there."""
    from sagellm.core.config import SageConfig
    from sagellm.demo_model.random_model import write_random_model
    from sagellm.engines.lmdeploy.engine import LMDeployEngine

    model = write_random_model(
        scratch / "model", hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2, intermediate_size=128,
        vocab_size=VOCAB_SIZE, tie_embeddings=True,
    )  # fmt: skip
    write_chain_model(model, QUIET)
    jobs = _jobs(random.Random(seed), requests)
    with LMDeployEngine(SageConfig(**SIZES), model) as plain:
        parts = [jobs[start : start + PART] for start in range(0, len(jobs), PART)]
        expected = [engine_answers(plain, [job for job in part if job[2] is None]) for part in parts]
    runs = []
    for strategy in strategies:
        given: dict[str, Any] = {"budget": BUDGET} if strategy.startswith("dynamic") else {}
        if strategy.endswith("draft"):
            given |= {"model": str(model)} if strategy == "draft" else {"options": {"model": str(model)}}
        guessing = SageConfig(**SIZES, speculative=strategy, speculative_options=given | options.get(strategy, {}))
        with LMDeployEngine(guessing, model) as engine:
            runs.append({"strategy": strategy, **_run(engine, parts, expected)})
        output.say(json_text(runs[-1]))
    return runs


def _run(engine: Any, parts: list[list[Job]], expected: list[list[tuple[int, ...]]]) -> dict[str, Any]:
    process, memory = psutil.Process(), []
    differences = answered = 0
    start_s = time.perf_counter()
    for part, theirs in zip(parts, expected, strict=True):
        found = engine_answers(engine, part)
        ours = [tokens for tokens, (_, _, end) in zip(found, part, strict=True) if end is None]
        differences += sum(one != other for one, other in zip(ours, theirs, strict=True))
        answered += len(ours)
        memory.append(process.memory_info().rss)
    report, counts = engine.hooks.report(), engine.hooks.kv.counts()
    speculator = engine.engine.executor.model_agent.agent_strategy.speculator
    engine_answers(engine, [parts[0][0]])  # what has ended is told of with the next step
    guesses = report["speculation"]
    return {
        "answered": answered, "broken_off": sum(map(len, parts)) - answered, "differences": differences,
        "preempted": report["preempted"], "active_blocks": counts.active,
        "lost_blocks": counts.total - counts.free - counts.cached - counts.active,
        "texts_left": max(0, len(speculator._texts) - 1), "faults": guesses["faults"],
        "drafted": guesses["drafted"], "accepted": guesses["accepted"], "mean_accepted": guesses["mean_accepted"],
        "tokens_per_step": guesses["tokens_per_step"],
        "rss_mb": [round(memory[place] / 2**20) for place in (0, len(memory) // 2, -1)],
        "seconds": round(time.perf_counter() - start_s, 1),
    }  # fmt: skip


def _jobs(draw: random.Random, count: int) -> list[Job]:
    """A prompt is a beginning that others share, a few tokens of its own, and a piece of the beginning again. The
    answer goes on as the beginning did."""
    from sagellm.engines.base import SamplingParams

    following = successors(VOCAB_SIZE)
    beginnings = []
    for size in (16, 40, 70) * 4:
        beginnings.append([draw.randrange(FIRST, VOCAB_SIZE)])
        while len(beginnings[-1]) < size:
            beginnings[-1].append(int(following[beginnings[-1][-1]]))
    jobs = []
    for number in range(count):
        beginning, alone = draw.choice(beginnings), [draw.randrange(3, VOCAB_SIZE) for _ in range(draw.randrange(1, 20))]
        start = draw.randrange(0, len(beginning) - 4)
        prompt = beginning + alone + beginning[start : start + draw.randrange(2, 5)]
        params = SamplingParams(
            max_new_tokens=draw.randrange(1, 48), ignore_eos=True, temperature=draw.choice((0.0, 0.0, 0.7)), top_k=20,
            seed=number + 1,
        )  # fmt: skip
        jobs.append((prompt, params, draw.randrange(0, 24) if draw.random() < BROKEN_OFF else None))
    return jobs


def engine_answers(engine: Any, jobs: list[Job]) -> list[tuple[int, ...]]:
    """Tokens of each; of those that are broken off what came before. Returns when the engine has ended every session."""
    return engine._on_loop(_answers(engine, jobs))


async def _answers(engine: Any, jobs: list[Job]) -> list[tuple[int, ...]]:
    room = asyncio.Semaphore(AT_ONCE)

    async def one(prompt: list[int], params: Any, end: int | None) -> tuple[int, ...]:
        async with room:
            if end is None:
                return (await engine._one(prompt, params, 0, 0)).token_ids
            return await _broken_off(engine, prompt, params, end)

    found = await asyncio.gather(*[one(*job) for job in jobs])
    while engine.engine.scheduler.sessions:
        await asyncio.sleep(0.001)
    return found


async def _broken_off(engine: Any, prompt: list[int], params: Any, end: int) -> tuple[int, ...]:
    from sagellm.engines.lmdeploy.running import _gen_config

    session = next(engine._sessions)
    instance = engine.engine.create_instance()
    tokens: list[int] = []
    stream = instance.async_stream_infer(session, list(prompt), gen_config=_gen_config(params))
    try:
        async for output in stream:
            tokens.extend(int(token) for token in output.token_ids)
            if len(tokens) >= end:
                break
        await instance.async_cancel(session)
    finally:
        await stream.aclose()
        await instance.async_end(session)
    return tuple(tokens)


if __name__ == "__main__":
    main()
