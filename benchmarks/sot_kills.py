"""Workers of skeleton-of-thought that are killed at random moments while they write points.

    python -m benchmarks.sot_kills [--kills 200] [--seed 0] [--out FILE]

A master and several workers on the demo model answer one question after the other. In each answer one worker gets SIGKILL at a
random moment. Every answer must be the one of a single engine; no process and no shared memory may stay.
"""

import os
import random
import threading
import time
from typing import Any

import click
import psutil

from benchmarks.contestants import summary
from benchmarks.output import Output, spread, table, with_output
from benchmarks.worker_kills import shared_memory
from sagellm.accel.sot.pipeline import SpecSoT
from sagellm.accel.sot.results import SkeletonParseResult, TaskData
from sagellm.accel.sot.skeleton import ask_for_point
from sagellm.accel.sot.workers import open_group
from sagellm.core.config import SageConfig
from sagellm.core.engines import open_engine
from sagellm.core.running import SamplingParams
from sagellm.demo_model import ensure_demo_model

WORKERS, POINTS, TOKENS = 8, 12, 40
QUESTION = "How do I read a file?"


@click.command()
@click.option("--kills", default=200, show_default=True, help="Workers to kill.")
@click.option("--seed", default=0, show_default=True, help="Seed of moments and workers.")
@with_output
def main(kills: int, seed: int, output: Output) -> None:
    """Kill workers, print what came of it, and write the result."""
    result = output.save(sweep(kills, seed))
    names = ("kills", "answers", "wrong", "with points written again", "left_processes", "left_files")
    output.say(table(("", "seen"), [(name, result[name]) for name in names]))
    output.say(f"seconds of an answer {spread(result['answer_s'])}, at most {result['longest_answer_s']:.2f}")
    output.finish(result)
    if result["wrong"] or result["left_processes"] or result["left_files"]:
        raise click.ClickException("something was lost, or stayed behind.")


def sweep(kills: int, seed: int) -> dict[str, Any]:
    """Kill so many workers, one in each answer, and return counts."""
    from transformers import AutoTokenizer

    chance, model = random.Random(seed), str(ensure_demo_model())
    config = SageConfig(device="cpu", model=model, dtype="float32", kv_blocks=160, context_length=2048, threads=1)
    tokenizer = AutoTokenizer.from_pretrained(model)

    class Points(SpecSoT):
        def skeleton_parse(self, skeleton_text: str, task_prompt: str) -> SkeletonParseResult:
            tasks = tuple(TaskData(number, f"Part {number}", TOKENS) for number in range(POINTS))
            return SkeletonParseResult("plan", tasks, tuple(map(ask_for_point, tasks)))

    params, shared = SamplingParams(ignore_eos=True), shared_memory()
    engine = open_engine(config)
    expected = Points(engine, tokenizer, params=params).generate(QUESTION).branches
    engine.close()
    num_killed, wrong, again, left, answer_s = 0, 0, 0, 0, list[float]()
    while num_killed < kills:
        with open_group(config, min(WORKERS, kills - num_killed)) as (engine, master, processes):
            sot = Points(engine, tokenizer, params=params, group=master)
            whole_s = max(_timed(sot)[1] for _ in range(2))
            victims = chance.sample(processes, len(processes))
            for victim in victims:
                timer = threading.Timer(chance.uniform(0, whole_s), victim.kill)
                timer.start()
                answer, seconds = _timed(sot)
                timer.join()
                num_killed += 1
                wrong += answer.branches != expected
                again += answer.stats["by_workers"] < _share(len(victims) - victims.index(victim))
                answer_s.append(seconds)
        left += sum(psutil.pid_exists(process.pid) for process in processes)
    return {
        "kills": num_killed, "seed": seed, "answers": len(answer_s), "wrong": wrong, "with points written again": again,
        "left_processes": left, "left_files": len(shared_memory() - shared), "answer_s": summary(answer_s),
        "longest_answer_s": max(answer_s), "workers": WORKERS, "cores": len(os.sched_getaffinity(0)),
    }  # fmt: skip


def _share(num_workers: int) -> int:
    """Points that workers were given: all but those of the master."""
    return POINTS - -(-POINTS // (1 + num_workers))


def _timed(sot: SpecSoT) -> tuple[Any, float]:
    start_s = time.perf_counter()
    return sot.generate(QUESTION), time.perf_counter() - start_s


if __name__ == "__main__":
    main()
