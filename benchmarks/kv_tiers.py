"""Conversations that do not fit the engine's blocks: first tokens with and without tiers below the pool.

    python -m benchmarks.kv_tiers [--model NAME] [--rounds 3] [--out FILE]

On the CPU engine, in bfloat16: random weights of Qwen2.5-0.5B's shape and random tokens, or a model, `smollm2` for example, and
English. Conversations take turns, one request at a time, so that
by the time one goes on the others have taken its blocks. Each turn repeats the conversation and adds to it. Contestants get
the same prompts in the same order, turn by turn, and have the same pool:

- *no tiers*: evicted blocks are computed again.
- *cpu tier*: evicted blocks go to memory of the host, which holds all conversations.
- *disk tier*: the host tier holds a part of them. The rest goes to files in a fresh folder.
- *slow disk*: a disk tier of 4 MB/s (`SlowStore`), so that a block takes longer to load than to compute. The engine is not
  told; its cost model has to find out.

The figure is the time to the first token of every turn but a conversation's first. A slower tier that is never worse than
computing again has a ratio to *no tiers* of at most 1.
"""

import itertools
import tempfile
import time
from pathlib import Path
from typing import Any

import click
import numpy as np

from benchmarks.contestants import Contestant, paired_ratio, summary
from benchmarks.cpu_engine import write_half_billion
from benchmarks.models.real_text import RealText, model_folder
from benchmarks.output import Output, spread, with_output
from benchmarks.output import table as output_table

NONE, CPU, DISK, SLOW = "no tiers", "cpu tier", "disk tier", "slow disk"
SLOW_BYTES_PER_S = 4e6
BLOCK_SIZE, KV_BLOCKS = 64, 48
HOST_BLOCKS, FEW_HOST_BLOCKS = 320, 48
CONVERSATIONS, TURNS = 12, 4
FIRST_TOKENS, TURN_TOKENS, NEW_TOKENS = 512, 128, 4


@click.command()
@click.option("--model", "name", help="Name or folder of a model; default: random weights of a 0.5B shape.")
@click.option("--rounds", default=3, show_default=True, help="Rounds, each with new conversations.")
@click.option("--threads", default=2, show_default=True, help="Compute threads of an engine.")
@with_output
def main(name: str | None, rounds: int, threads: int, output: Output) -> None:
    """Measure, print a table, and write the result."""
    with tempfile.TemporaryDirectory() as scratch:
        model = model_folder(name) if name else write_half_billion(Path(scratch))
        text = RealText(model) if name else None
        contestants = [
            Contestant(NONE, build, str(model), threads, 0, None),
            Contestant(CPU, build, str(model), threads, HOST_BLOCKS, None),
            Contestant(DISK, build, str(model), threads, FEW_HOST_BLOCKS, str(Path(scratch) / "tier")),
            Contestant(SLOW, build, str(model), threads, FEW_HOST_BLOCKS, str(Path(scratch) / "slow"), SLOW_BYTES_PER_S),
        ]
        answers: dict[str, list[dict[str, Any]]] = {contestant.name: [] for contestant in contestants}
        try:
            for number, turn in itertools.product(range(rounds), range(TURNS)):
                prompts = [_prompt(number, each, turn, text) for each in range(CONVERSATIONS)]
                for contestant in contestants:
                    answers[contestant.name].append(contestant.ask({"prompts": prompts, "turn": turn}))
                contestants = contestants[1:] + contestants[:1]  # each is the first one now and then
        finally:
            for contestant in contestants:
                contestant.close()
    result = {"model": name or "0.5B shape", **report(answers)}
    output.say(table(result))
    output.finish(result)


def report(answers: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    later = {name: [row for row in rows if row["turn"] > 0] for name, rows in answers.items()}
    first_s = {name: [value for row in rows for value in row["first_s"]] for name, rows in later.items()}
    means = {name: [float(np.mean(row["first_s"])) for row in rows] for name, rows in later.items()}
    return {
        "conversations": CONVERSATIONS, "turns": TURNS, "kv_blocks": KV_BLOCKS, "block_size": BLOCK_SIZE,
        "host_blocks": {CPU: HOST_BLOCKS, DISK: FEW_HOST_BLOCKS, SLOW: FEW_HOST_BLOCKS},
        "slow_bytes_per_s": SLOW_BYTES_PER_S,
        "first_s": {name: {"mean": float(np.mean(values)), **summary(values)} for name, values in first_s.items()},
        "times_faster": {name: paired_ratio(means[NONE], means[name]) for name in (CPU, DISK, SLOW)},
        "hit_tokens": {name: rows[-1]["hit_tokens"] for name, rows in answers.items()},
        "query_tokens": {name: rows[-1]["query_tokens"] for name, rows in answers.items()},
        "faults": {name: rows[-1]["faults"] for name, rows in answers.items()},
    }  # fmt: skip


def table(result: dict[str, Any]) -> str:
    rows = []
    for name, figures in result["first_s"].items():
        share, ratio = result["hit_tokens"][name] / result["query_tokens"][name], result["times_faster"].get(name)
        first_ms = [f"{1e3 * figures[key]:.0f}" for key in ("mean", "median")]
        rows.append([name, *first_ms, f"{share:.2f}", spread(ratio) if ratio else ""])
    return output_table(["contestant", "mean ms", "median ms", "hit", "times faster, each turn's mean"], rows)


# ---- contestants, each in its own process


def build(model: str, threads: int, host_blocks: int, disk: str | None, bytes_per_s: float | None = None) -> Any:
    from sagellm.core.config import KVConfig, SageConfig
    from sagellm.engines.base import SamplingParams
    from sagellm.engines.lmdeploy.engine import LMDeployEngine

    if bytes_per_s is not None:
        _slow_down(bytes_per_s)
    kv = KVConfig(policy="lru", disk=disk) if host_blocks else None
    config = SageConfig(
        device="cpu", dtype="bfloat16", threads=threads, context_length=2048, max_batch_size=1,
        block_size=BLOCK_SIZE, kv_blocks=KV_BLOCKS, host_kv_blocks=host_blocks, kv=kv,
    )  # fmt: skip
    engine = LMDeployEngine(config, Path(model))
    params = SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True)

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        first_s = [engine.generate([prompt], params)[0].token_s[0] for prompt in request["prompts"]]
        found = engine.hooks.report()
        return {
            "turn": request["turn"], "first_s": first_s, "faults": len(found["faults"]),
            "hit_tokens": found["prefix"]["hit_tokens"], "query_tokens": found["prefix"]["query_tokens"],
        }  # fmt: skip

    answer.close = engine.close  # type: ignore[attr-defined]
    return answer


def _slow_down(bytes_per_s: float) -> None:
    """Every `DiskStore` that this process opens from now on takes as long as a device with this bandwidth, both ways."""
    from sagellm.kv_runtime import disk_store

    class SlowStore(disk_store.DiskStore):
        def commit(self, key: Any) -> None:
            time.sleep(self._prepared[key].content.size / bytes_per_s)
            super().commit(key)

        def read(self, key: Any, *args: Any, **kwargs: Any) -> Any:
            time.sleep(self.describe(key).block.size_bytes / bytes_per_s)
            return super().read(key, *args, **kwargs)

    disk_store.DiskStore = SlowStore


def _prompt(round_number: int, conversation: int, turn: int, text: RealText | None) -> list[int]:
    num_tokens, most = FIRST_TOKENS + turn * TURN_TOKENS, FIRST_TOKENS + TURNS * TURN_TOKENS
    if text is not None:
        return text.prose(most, round_number, conversation)[:num_tokens]
    random = np.random.default_rng([round_number, conversation])
    return random.integers(10, 150_000, most).tolist()[:num_tokens]


if __name__ == "__main__":
    main()
