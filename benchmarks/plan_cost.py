"""Cost of a plan beside its step: strategies in the real engine, a full batch.

    python -m benchmarks.plan_cost [--strategy fifo,hybrid] [--requests 256] [--shape small] [--out FILE]

Random weights in bfloat16 on the CPU engine. Two phases, each judged over its steps alone:

- *decoding*: all requests came at once and decode together;
- *arrivals*: a quarter of them comes while the others decode; the steps of which somebody waits when they are chosen.

Times of the parts (`decide`, `build`, `optimize`, `lower`, and the `hook` around them) are CPU time of the plug-in's thread. A
*question* is what the engine waits for, by the wall clock: the hand-over to the plug-in's thread and back, the hook, the check
of its answer. The share is that of the questions in the steps' durations.
"""

import tempfile
from pathlib import Path
from typing import Any

import click

from benchmarks.contestants import Contestant
from benchmarks.output import Output, with_output
from benchmarks.scheduling.engine import write_shape
from benchmarks.scheduling.plan_times import PARTS, Steps, build, figures
from benchmarks.scheduling.workloads import Job, crowd

STRATEGIES = ("fifo", "slo_aware", "hybrid", "adaptive", "fair")
PHASES = ("decoding", "arrivals")
PROMPT_TOKENS = 16
LATE_S = 4.0  # in which the late ones come


@click.command()
@click.option(
    "--strategy", "strategies", default=",".join(STRATEGIES), show_default=True,
    help="Strategies, separated by commas.",
)
@click.option(
    "--requests", "num_requests", type=click.IntRange(8), default=256, show_default=True,
    help="Requests of the batch.",
)
@click.option("--new-tokens", type=click.IntRange(8), default=48, show_default=True, help="New tokens of each request.")
@click.option(
    "--shape", type=click.Choice(["small", "0.5B"]), default="small", show_default=True,
    help="Shape of the random model.",
)
@click.option("--threads", default=2, show_default=True, help="Compute threads of an engine.")
@with_output
def main(strategies: str, num_requests: int, new_tokens: int, shape: str, threads: int, output: Output) -> None:
    """Measure, print a table, and write the result."""
    names = read_strategies(strategies)
    result: dict[str, Any] = {"shape": shape, "threads": threads, "requests": num_requests}
    jobs = {
        "decoding": crowd(0, num_requests, PROMPT_TOKENS, new_tokens),
        "arrivals": crowd(0, num_requests, PROMPT_TOKENS, new_tokens, num_requests // 4, LATE_S),
    }
    # The most that a request takes, and a block to begin with.
    blocks = num_requests * ((PROMPT_TOKENS + new_tokens) // 64 + 2)
    settings = {"max_batch_size": num_requests, "kv_blocks": max(blocks, 160)}
    with tempfile.TemporaryDirectory() as scratch:
        model = write_shape(Path(scratch), shape)
        for name in names:
            contestant = Contestant(name, build, str(model), threads, name, settings)
            try:
                answers = {phase: _answer(contestant, jobs[phase]) for phase in PHASES}
            finally:
                contestant.close()
            result[name] = {phase: figures(of_phase(answers[phase]["steps"], phase, num_requests)) for phase in PHASES}
            for phase in PHASES:
                output.say(line(name, phase, result[name][phase]))
            output.save(result)
    output.finish(result)


def read_strategies(text: str) -> list[str]:
    """Raises click.BadParameter: one that is unknown; it lists the known ones."""
    from sagellm.core.errors import PlanError
    from sagellm.scheduler_ir.strategies.registry import find_strategy

    names = text.split(",")
    try:
        for name in names:
            find_strategy(name)
    except PlanError as error:
        raise click.BadParameter(str(error)) from None
    return names


def of_phase(steps: Steps, phase: str, num_requests: int) -> Steps:
    if phase == "arrivals":
        return [row for row in steps if row["waiting"]]
    return [row for row in steps if not row["waiting"] and row["requests"] == num_requests]


def line(name: str, phase: str, found: dict[str, Any]) -> str:
    """One line of the table. Times of the parts in us, median; of the question also the 99th percentile."""
    if not found["steps"]:
        return f"{name:<10} {phase:<9} no such step"
    parts = " ".join(f"{part} {found[f'{part}_us']['median']:5.0f}" for part in PARTS)
    question, step_ms = found["question_us"], found["step_ms"]["median"]
    return (
        f"{name:<10} {phase:<9} {found['steps']:4d} steps  {parts} us  question {question['median']:5.0f} "
        f"(p99 {question['p99']:5.0f})  step {step_ms:6.1f} ms  share {found['share']:.2%} (p99 {found['share_p99']:.2%})"
    )


def _answer(contestant: Contestant, jobs: list[Job]) -> dict[str, Any]:
    answer = contestant.ask([list(job) for job in jobs])
    if answer["faults"]:
        raise click.ClickException(f"{contestant.name} was switched off: {answer['faults']}")
    return answer


if __name__ == "__main__":
    main()
