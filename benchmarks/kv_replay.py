"""Does a replay say what the engine did? The same requests, policy and capacity, decision by decision.

    python -m benchmarks.kv_replay [--policy lru,s3fifo,arc] [--requests 500] [--out FILE]

A tiny model on the CPU engine, a pool far too small for the crowd of requests, so that they evict and preempt each other.
Each engine records its events; `verify_log` feeds them to fresh books and policies and compares every lookup, every victim
with its reason, and every move. `hit blocks` and `disagreeing lookups` compare the engine's own prefix index with the books.
"""

import random
import tempfile
from pathlib import Path
from typing import Any

import click

from benchmarks.output import Output, table, with_output

SYSTEMS, DOCUMENTS = (48, 48, 33), (20, 47, 16, 80, 64, 31)  # tokens
KV_BLOCKS, BLOCK_SIZE, MOST_NEW = 30, 16, 24


@click.command()
@click.option(
    "--policy", default="lru,s3fifo,arc,gdsf,wtinylfu,prefix_reuse", show_default=True, help="Policies, separated by commas."
)
@click.option("--requests", default=500, show_default=True, help="Requests of each run.")
@click.option("--host-kv-blocks", default=24, show_default=True, help="Blocks of the host tier; 0 turns it off.")
@with_output
def main(policy: str, requests: int, host_kv_blocks: int, output: Output) -> None:
    """Run, replay, print a table, and write the result."""
    from sagellm.demo_model.random_model import write_random_model

    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        model = write_random_model(
            Path(scratch) / "tiny", architecture="llama", hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2,
            intermediate_size=128, vocab_size=512, dtype="float32", max_position_embeddings=2048,
        )  # fmt: skip
        for name in policy.split(","):
            for host_blocks in dict.fromkeys((0, host_kv_blocks)):
                rows.append(compare(name, model, Path(scratch), requests, host_blocks))
    output.say(table(list(rows[0]), [row.values() for row in rows]))
    output.finish({"requests": requests, "rows": rows})
    if any(row["differences"] or row["lookups_disagreed"] for row in rows):
        raise SystemExit(1)


def compare(policy: str, model: Path, folder: Path, requests: int, host_blocks: int) -> dict[str, Any]:
    """One engine, its record, and the replay of that."""
    from sagellm.core.config import KVConfig, SageConfig
    from sagellm.engines.base import SamplingParams
    from sagellm.engines.lmdeploy.engine import LMDeployEngine
    from sagellm.replay.verify import verify_log

    log = folder / f"{policy.replace(':', '.')}-{host_blocks}.jsonl"
    tiers = {"cpu_policy": policy, "migration": "always"} if host_blocks else {}
    kv = KVConfig(policy=policy, **tiers)
    config = SageConfig(
        device="cpu", threads=1, block_size=BLOCK_SIZE, kv_blocks=KV_BLOCKS, host_kv_blocks=host_blocks, max_batch_size=8,
        record=log, kv=kv,
    )  # fmt: skip
    draw = random.Random(1)
    params = [SamplingParams(draw.randrange(1, MOST_NEW), ignore_eos=True) for _ in range(requests)]
    with LMDeployEngine(config, model) as engine:
        engine.generate(make_prompts(requests), params)
        report = engine.hooks.report()
    if report["faults"]:
        raise click.ClickException(f"{policy}: a plug-in was switched off: {report['faults']}")
    found = verify_log(log)
    return {
        "policy": policy, "tiers": "gpu,cpu" if host_blocks else "gpu", "preempted": report["preempted"],
        "lookups": found.counts["kv_lookup"], "blocks_found": found.num_hits, "decisions": found.num_decisions,
        "victims": found.num_victims, "differences": len(found.differences) + len(found.gaps),
        "lookups_disagreed": sum(plugin["plugin"]["lookups_disagreed"] for plugin in report["plugins"].values()),
    }  # fmt: skip


def make_prompts(count: int) -> list[list[int]]:
    """Systems with documents behind them, cut anywhere: some prompts repeat, most share a beginning."""
    draw = random.Random(2)
    systems, documents = ([[draw.randrange(10, 500) for _ in range(n)] for n in each] for each in (SYSTEMS, DOCUMENTS))
    prompts = []
    for _ in range(count):
        text = draw.choice(systems) + draw.choice(documents) + draw.choice(documents)
        prompts.append(text[: draw.randrange(20, len(text))])
    return prompts


if __name__ == "__main__":
    main()
