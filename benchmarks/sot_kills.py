"""Workers of skeleton-of-thought that are killed at random moments while they write points.

    python -m benchmarks.sot_kills [--kills 200] [--target worker|engine|either] [--seed 0] [--out FILE]

A master and several workers on the demo model answer one question after the other. In each answer one worker gets SIGKILL at a
random moment, or a process of its engine alone. Every answer must be the one of a single engine. No process and no memory
that is shared may stay. An engine that can be killed alone computes in two processes (tensor parallelism).
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
from benchmarks.processes import workers_below
from benchmarks.worker_kills import is_in_use, shared_memory
from sagellm.accel.sot.pipeline import SpecSoT
from sagellm.accel.sot.results import SkeletonParseResult, TaskData
from sagellm.accel.sot.skeleton import ask_for_point
from sagellm.accel.sot.workers import open_group
from sagellm.core.config import SageConfig
from sagellm.core.engines import open_engine
from sagellm.core.running import SamplingParams
from sagellm.demo_model import ensure_demo_model

WORKERS, POINTS, TOKENS = 8, 12, 40
TARGETS = ("worker", "engine", "either")
END_S = 10.0  # for Python's trackers of shared memory, which end after the others
QUESTION = "How do I read a file?"


@click.command()
@click.option("--kills", default=200, show_default=True, help="Workers to kill.")
@click.option("--seed", default=0, show_default=True, help="Seed of moments and workers.")
@click.option("--target", type=click.Choice(TARGETS), default="worker", show_default=True,
              help="Processes to kill: a worker's, one of its engine alone, or either of them by chance.")  # fmt: skip
@with_output
def main(kills: int, seed: int, target: str, output: Output) -> None:
    """Kill workers, print what came of it, and write the result."""
    result = output.save(sweep(kills, seed, target))
    names = ("kills", "of engines alone", "answers", "wrong", "with points written again", "left_processes", "left_files")
    output.say(table(("", "seen"), [(name, result[name]) for name in names]))
    output.say(f"seconds of an answer {spread(result['answer_s'])}, at most {result['longest_answer_s']:.2f}")
    output.finish(result)
    if result["wrong"] or result["left_processes"] or result["left_files"]:
        raise click.ClickException("something was lost, or stayed behind.")


def sweep(kills: int, seed: int, target: str = "worker") -> dict[str, Any]:
    """Kill so many workers, one in each answer, and return counts. `target`: one of `TARGETS`."""
    from transformers import AutoTokenizer

    chance, model = random.Random(seed), str(ensure_demo_model())
    sizes = {"kv_blocks": 160, "context_length": 2048, "threads": 1, "tensor_parallel": 1 if target == "worker" else 2}
    config = SageConfig(device="cpu", model=model, dtype="float32", **sizes)
    tokenizer = AutoTokenizer.from_pretrained(model)

    class Points(SpecSoT):
        def skeleton_parse(self, skeleton_text: str, task_prompt: str) -> SkeletonParseResult:
            tasks = tuple(TaskData(number, f"Part {number}", TOKENS) for number in range(POINTS))
            return SkeletonParseResult("plan", tasks, tuple(map(ask_for_point, tasks)))

    params, shared = SamplingParams(ignore_eos=True), shared_memory()
    engine = open_engine(config)
    expected = Points(engine, tokenizer, params=params).generate(QUESTION).branches
    engine.close()
    num_killed, num_engines, wrong, again, left, answer_s = 0, 0, 0, 0, 0, list[float]()
    while num_killed < kills:
        with open_group(config, min(WORKERS, kills - num_killed)) as (engine, master, processes):
            sot = Points(engine, tokenizer, params=params, group=master)
            whole_s = max(_timed(sot)[1] for _ in range(2))
            victims = chance.sample([psutil.Process(process.pid) for process in processes], len(processes))
            families = [each for victim in victims for each in (victim, *victim.children(recursive=True))]
            for victim in victims:
                is_alone = target == "engine" or (target == "either" and chance.random() < 0.5)
                num_engines += is_alone
                hit = chance.choice(workers_below(victim)) if is_alone else victim
                timer = threading.Timer(chance.uniform(0, whole_s), hit.kill)
                timer.start()
                answer, seconds = _timed(sot)
                timer.join()
                num_killed += 1
                wrong += answer.branches != expected
                again += answer.stats["by_workers"] < _share(len(victims) - victims.index(victim))
                answer_s.append(seconds)
        _, alive = psutil.wait_procs(families, timeout=END_S)
        left += len(alive)
    left_files = [name for name in shared_memory() - shared if not is_in_use(name)]
    return {
        "kills": num_killed, "of engines alone": num_engines, "target": target, "seed": seed,
        "answers": len(answer_s), "wrong": wrong, "with points written again": again,
        "left_processes": left, "left_files": len(left_files), "answer_s": summary(answer_s),
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
