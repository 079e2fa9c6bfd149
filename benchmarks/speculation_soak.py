"""Many mixed requests through an engine that guesses, some of them broken off: nothing may be lost.

    python -m benchmarks.speculation_soak [--requests 10000] [--strategy suffix] [--out FILE]

A tiny random model in float32 on the CPU engine, a pool so small that requests preempt each other, prompts that share
beginnings, greedy and sampled, a fifth of them broken off by their clients. Afterwards: each answer that came to its end
against the same engine without guesses; every block free or cached, and held by nobody; no text of an ended request; memory
of the process.
"""

import asyncio
import json
import random
import tempfile
from pathlib import Path
from typing import Any

import click
import psutil

from benchmarks.machine import describe

AT_ONCE = 24
BROKEN_OFF = 0.2


@click.command()
@click.option("--requests", type=click.IntRange(10), default=10_000, show_default=True)
@click.option("--strategy", default="suffix", show_default=True)
@click.option("--options", default="{}", metavar="JSON")
@click.option("--seed", default=0, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), help="Write the result as JSON.")
def main(requests: int, strategy: str, options: str, seed: int, out: Path | None) -> None:
    """Run, print, and write the result; exit code 1: something was lost or differs."""
    with tempfile.TemporaryDirectory() as scratch:
        result = soak(Path(scratch), requests, strategy, json.loads(options), seed)
    click.echo(json.dumps(result, indent=1))
    if out is not None:
        out.write_text(json.dumps(result | {"machine": describe()}, indent=2) + "\n")
    if any(result[name] for name in ("differences", "active_blocks", "lost_blocks", "texts_left", "faults")):
        raise SystemExit(1)


def soak(scratch: Path, requests: int, strategy: str, options: dict[str, Any], seed: int) -> dict[str, Any]:
    from sagellm.core.config import SageConfig
    from sagellm.demo_model.random_model import write_random_model
    from sagellm.engines.lmdeploy.engine import LMDeployEngine

    model = write_random_model(
        scratch / "model", hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2, intermediate_size=128, vocab_size=512
    )
    sizes = {"device": "cpu", "threads": 1, "block_size": 16, "kv_blocks": 48, "max_batch_size": 16}
    plain = LMDeployEngine(SageConfig(**sizes), model)
    engine = LMDeployEngine(SageConfig(**sizes, speculative=strategy, speculative_options=options), model)
    jobs = _jobs(random.Random(seed), requests)
    process, peak = psutil.Process(), []
    differences = answered = 0
    for start in range(0, len(jobs), 500):
        part = jobs[start : start + 500]
        expected = engine_answers(plain, [(prompt, params, None) for prompt, params, end in part if end is None])
        found = engine_answers(engine, part)
        kept = [tokens for tokens, (_, _, end) in zip(found, part, strict=True) if end is None]
        differences += sum(ours != theirs for ours, theirs in zip(kept, expected, strict=True))
        answered += len(kept)
        peak.append(process.memory_info().rss)
    report, counts = engine.hooks.report(), engine.hooks.kv.counts()
    speculator = engine.engine.executor.model_agent.agent_strategy.speculator
    engine_answers(engine, [jobs[0]])  # what has ended is told of with the next step
    result = {
        "strategy": strategy, "requests": requests, "answered": answered, "broken_off": requests - answered,
        "differences": differences, "preempted": report["preempted"],
        "active_blocks": counts.active, "lost_blocks": counts.total - counts.free - counts.cached - counts.active,
        "texts_left": max(0, len(speculator._texts) - 1), "faults": report["speculation"]["faults"],
        "drafted": report["speculation"]["drafted"], "accepted": report["speculation"]["accepted"],
        "rss_mb": [round(peak[0] / 2**20), round(peak[len(peak) // 2] / 2**20), round(peak[-1] / 2**20)],
    }  # fmt: skip
    plain.close()
    engine.close()
    return result


def _jobs(draw: random.Random, count: int) -> list[tuple[list[int], Any, int | None]]:
    """(prompt, what is asked for, tokens after which the client leaves)."""
    from sagellm.engines.base import SamplingParams

    beginnings = [[draw.randrange(3, 60) for _ in range(draw.choice((16, 40, 70)))] for _ in range(12)]
    jobs = []
    for number in range(count):
        motif = [draw.randrange(3, 60) for _ in range(draw.randrange(1, 8))]
        prompt = draw.choice(beginnings) + motif * draw.randrange(1, 6)
        temperature = draw.choice((0.0, 0.0, 0.7))
        params = SamplingParams(
            max_new_tokens=draw.randrange(1, 48), ignore_eos=True, temperature=temperature, top_k=20, seed=number + 1
        )
        jobs.append((prompt, params, draw.randrange(0, 24) if draw.random() < BROKEN_OFF else None))
    return jobs


def engine_answers(engine: Any, jobs: list[tuple[list[int], Any, int | None]]) -> list[tuple[int, ...]]:
    """Tokens of each; of those that are broken off what came before. Returns when the engine has ended every session."""
    return engine._on_loop(_answers(engine, jobs))


async def _answers(engine: Any, jobs: list[tuple[list[int], Any, int | None]]) -> list[tuple[int, ...]]:
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
    from sagellm.engines.lmdeploy.engine import _gen_config

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
