"""Decode steps of the CPU engine and of `transformers` while other processes want the same cores.

    python -m benchmarks.neighbours [--model NAME] [--rounds 5] [--out FILE]

A neighbour is a loop that never waits, in a session of its own, as from another terminal: Linux shares cores by session. A
figure is the time of a step of one request, beside the median of the quiet rounds before and after.
"""

import contextlib
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import click

from benchmarks.contestants import Contestant, interleave, summary
from benchmarks.cpu_engine import OURS, PEER, build_ours, build_transformers
from benchmarks.models.real_text import RealText, model_folder
from benchmarks.output import Output, spread, table, with_output

NEIGHBOURS = (0, 1, 2, 0)
PROMPT_TOKENS, NEW_TOKENS = 64, 33
SETTLE_S = 0.3


@click.command()
@click.option("--model", default="smollm2", show_default=True, help="Name or folder of a model.")
@click.option("--rounds", default=5, show_default=True, help="Rounds with each number of neighbours.")
@click.option("--threads", default=2, show_default=True, help="Compute threads of an engine.")
@with_output
def main(model: str, rounds: int, threads: int, output: Output) -> None:
    """Measure, print a table, and write the result."""
    folder = model_folder(model)
    text = RealText(folder)
    with contextlib.ExitStack() as stack:
        contestants = [
            Contestant(OURS, build_ours, str(folder), threads, {"context": 2 * (PROMPT_TOKENS + NEW_TOKENS), "batch": 1}),
            Contestant(PEER, build_transformers, str(folder), threads),
        ]
        for contestant in contestants:
            stack.callback(contestant.close)
        request = {"do": "times", "prompts": [text.prose(PROMPT_TOKENS, 1, 0)], "new_tokens": NEW_TOKENS}
        interleave(contestants, request, 1)
        steps: dict[str, dict[int, list[float]]] = {each.name: {} for each in contestants}
        for number in NEIGHBOURS:
            with busy(number):
                for name, answers in interleave(contestants, request, rounds).items():
                    steps[name].setdefault(number, []).extend(_step_s(times[0]) for times in answers)
    result: dict[str, Any] = {"model": model, "threads": threads, "rounds": rounds, "step_s": {}, "times_quiet": {}}
    for name, by_number in steps.items():
        quiet = statistics.median(by_number[0])
        result["step_s"][name] = {str(number): summary(values) for number, values in by_number.items()}
        result["times_quiet"][name] = {
            str(number): summary([value / quiet for value in values]) for number, values in by_number.items()
        }
    result = output.save(result)
    rows = [
        (name, number, f"{1e3 * result['step_s'][name][number]['median']:.1f}", spread(result["times_quiet"][name][number]))
        for name in steps
        for number in map(str, sorted(set(NEIGHBOURS)))
    ]
    output.say(table(["engine", "busy neighbours", "step, ms", "times quiet"], rows))
    output.finish(result)


@contextlib.contextmanager
def busy(number: int) -> Iterator[None]:
    """Run that many loops that never wait, each in a session of its own."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"], start_new_session=True) for _ in range(number)]
    try:
        time.sleep(SETTLE_S)
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def _step_s(token_s: list[float]) -> float:
    return (token_s[-1] - token_s[0]) / (len(token_s) - 1)


if __name__ == "__main__":
    main()
