"""Skeleton-of-thought beside plain decoding: seconds of an answer, of eight at once, and plans that are of use.

    python -m benchmarks.sot [--model smollm2] [--points 8] [--tokens 64] [--questions 100] [--only-two] [--out FILE]
    python -m benchmarks.sot --model 0.5B        # random weights of Qwen2.5-0.5B's shape; no plans are read

Lengths are forced: a plan of `PLAN` tokens is written, then `--points` points of `--tokens` tokens, whatever the model would
say. Plain decoding writes as many tokens, those of the plan included. All answers come from one engine. Repetitive points ask
for the same text, which the second engine guesses with the strategy `suffix`. A plan is valid if its points differ and none is
cut off. Two engines of one thread each, a master and a worker, stand beside one engine of one thread.
"""

import contextlib
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from benchmarks.contestants import Contestant, interleave, paired_ratio, summary
from benchmarks.cpu_engine import write_half_billion
from benchmarks.models.real_text import model_folder
from benchmarks.output import Output, spread, table, with_output
from sagellm.accel.sot.pipeline import PLAN_TOKENS, SpecSoT
from sagellm.accel.sot.results import SkeletonParseResult, SkeletonPrefillResult, TaskData
from sagellm.accel.sot.skeleton import ask_for_plan, ask_for_point
from sagellm.core.running import SamplingParams

PLAN, POINTS, TOKENS = 96, 8, 64
AT_ONCE, AT_ONCE_BY_TWO = 8, 4
VERBS = ("choose", "learn about", "take care of", "explain", "compare", "improve", "plan", "pay for", "repair", "write about")
THINGS = (
    "a bicycle", "a garden", "a small company", "a computer", "healthy food", "a long journey", "old books", "a house", "music",
    "a football team",
)  # fmt: skip
QUESTIONS = [f"How do I {verb} {thing}?" for verb in VERBS for thing in THINGS]
NAMES = ("plain", "sot")
HALF_BILLION = "0.5B"


@click.command()
@click.option("--model", default="smollm2", show_default=True, help="Name or folder of a model with a chat template, or 0.5B.")
@click.option("--points", default=POINTS, show_default=True, help="Points of a plan.")
@click.option("--tokens", default=TOKENS, show_default=True, help="Tokens of a point.")
@click.option("--questions", default=100, show_default=True, help="Questions whose plans are read; 0 for none.")
@click.option("--only-two", is_flag=True, help="Measure two engines beside one, and nothing else.")
@click.option("--rounds", default=3, show_default=True, help="Measured rounds.")
@click.option("--threads", default=2, show_default=True, help="Compute threads of an engine.")
@with_output
def main(
    model: str, points: int, tokens: int, questions: int, only_two: bool, rounds: int, threads: int, output: Output
) -> None:
    """Measure, print a table, and write the result."""
    with tempfile.TemporaryDirectory() as scratch:
        questions = 0 if model == HALF_BILLION else questions
        _measure(model, _folder(model, Path(scratch)), points, tokens, questions, only_two, rounds, threads, output)


def _measure(
    model: str, folder: Path, points: int, tokens: int, questions: int, only_two: bool, rounds: int, threads: int,
    output: Output,
) -> None:  # fmt: skip
    if only_two:
        by_two = _two_engines(str(folder), rounds)
        size = {"points": POINTS, "tokens": TOKENS, "plan_tokens": PLAN}
        result = output.save({"model": model, **size, "rounds": rounds, "two_engines_times_one": by_two})
        output.say(table(("", "seen"), _rows_of_two(by_two)))
        output.finish(result)
        return
    engines = {name: Contestant(name, build, str(folder), threads, name) for name in ("none", "suffix")}
    size = {"points": points, "tokens": tokens}
    seconds: dict[str, dict[str, list[float]]] = {}
    try:
        for many, count in (("one", 1), ("at once", AT_ONCE)):
            for name in NAMES:
                request = size | {"do": name, "count": count, "repeats": False}
                interleave([engines["none"]], request, 1)
                seconds.setdefault(many, {})[name] = []
            for number in range(rounds):
                for name in NAMES if number % 2 == 0 else NAMES[::-1]:
                    seconds[many][name].append(engines["none"].ask(size | {"do": name, "count": count, "repeats": False}))
        request = size | {"do": "sot", "count": 1, "repeats": True}
        interleave(list(engines.values()), request, 1)
        repeated = interleave(list(engines.values()), request, rounds)
        plans = engines["none"].ask({"do": "plans", "questions": QUESTIONS[:questions]}) if questions else {}
    finally:
        for engine in engines.values():
            engine.close()
    by_two = _two_engines(str(folder), rounds)
    result = output.save({
        "model": model, "points": points, "tokens": tokens, "plan_tokens": PLAN, "threads": threads, "rounds": rounds,
        "seconds": {many: {name: summary(values) for name, values in by.items()} for many, by in seconds.items()},
        "times_plain": {many: paired_ratio(by["sot"], by["plain"]) for many, by in seconds.items()},
        "repetitive_times_no_guesses": paired_ratio(repeated["suffix"], repeated["none"]), "plans": plans,
        "two_engines_times_one": by_two,
    })  # fmt: skip
    rows = [
        ("one answer, relative to plain decoding", spread(result["times_plain"]["one"])),
        (f"{AT_ONCE} answers at once, relative to plain decoding", spread(result["times_plain"]["at once"])),
        ("repetitive points with `suffix`, relative to no guesses", spread(result["repetitive_times_no_guesses"])),
        *_rows_of_two(by_two),
        *((f"plans: {name}", f"{value:.0%}") for name, value in plans.items()),
    ]
    output.say(table(("", "seen"), rows))
    output.finish(result)


def _folder(model: str, scratch: Path) -> Path:
    if model != HALF_BILLION:
        return model_folder(model)
    found = write_half_billion(scratch)
    for file in model_folder("smollm2").glob("*token*"):
        shutil.copy(file, found)
    return found


class Forced(SpecSoT):
    """Writes a plan of `PLAN` tokens, then `points` points of `tokens` tokens."""

    def __init__(
        self, engine: Any, tokenizer: Any, points: int = POINTS, tokens: int = TOKENS, repeats: bool = False, group: Any = None
    ) -> None:
        super().__init__(engine, tokenizer, params=SamplingParams(ignore_eos=True), group=group)
        self._size, self._repeats = (points, tokens), repeats

    def skeleton_prefill(self, input_ids: Any, *_: Any) -> Any:
        found = self._start(input_ids, SamplingParams(PLAN, ignore_eos=True), keep=True)
        return SkeletonPrefillResult(input_ids=tuple(input_ids), input_len=len(input_ids), request=found)

    def skeleton_parse(self, skeleton_text: str, task_prompt: str) -> Any:
        points, tokens = self._size
        titles = ["Say it once more" if self._repeats else f"Part {number}" for number in range(points)]
        tasks = tuple(TaskData(number, title, tokens) for number, title in enumerate(titles))
        return SkeletonParseResult("plan", tasks, tuple(map(ask_for_point, tasks)))


def _two_engines(model: str, rounds: int) -> dict[str, Any]:
    """Return the seconds of two engines relative to one, each of one thread."""
    found = {}
    contestants = [Contestant(str(1 + workers), build, model, 1, "none", workers) for workers in (0, 1)]
    try:
        for many, count in (("one", 1), ("at once", AT_ONCE_BY_TWO)):
            request = {"do": "sot", "count": count, "points": POINTS, "tokens": TOKENS, "repeats": False}
            interleave(contestants, request, 1)
            seconds = interleave(contestants, request, rounds)
            found[many] = paired_ratio(seconds["2"], seconds["1"])
    finally:
        for contestant in contestants:
            contestant.close()
    return found


def _rows_of_two(by_two: dict[str, Any]) -> list[tuple[str, str]]:
    return [
        ("one answer by two engines of one thread, relative to one engine", spread(by_two["one"])),
        (f"{AT_ONCE_BY_TWO} answers at once, the same", spread(by_two["at once"])),
    ]


def build(model: str, threads: int, speculative: str, workers: int = 0) -> Any:
    """Answers {"do", "count", "points", "tokens", "repeats"} with seconds, and {"do": "plans", "questions"} with shares."""
    from transformers import AutoTokenizer

    from sagellm.accel.sot.workers import open_group
    from sagellm.core.config import SageConfig
    from sagellm.engines.lmdeploy.engine import LMDeployEngine

    tokenizer = AutoTokenizer.from_pretrained(model)
    sizes = {"kv_blocks": 400, "max_batch_size": 128, "context_length": 2048, "block_size": 64, "prefix_caching": False}
    strategy = {} if speculative == "none" else {"speculative": speculative}
    config = SageConfig(device="cpu", model=model, threads=threads, **sizes, **strategy)
    stack, group = contextlib.ExitStack(), None
    if workers:
        engine, group, _ = stack.enter_context(open_group(config, workers, "benchmarks.sot:Forced"))
    else:
        engine = stack.enter_context(LMDeployEngine(config))

    def answer_all(do: str, count: int, points: int, tokens: int, repeats: bool) -> float:
        asked = [QUESTIONS[7 * number] for number in range(count)]
        whole = PLAN + points * tokens

        def one(question: str) -> None:
            sot = Forced(engine, tokenizer, points, tokens, repeats, group)
            found = sot.generate(question, do == "sot", max_new_tokens=tokens if do == "sot" else whole)
            made = found.stats["branch_tokens"] + PLAN if do == "sot" else found.stats["tokens"]
            if made not in (whole, whole - 1):  # a last token that ends a text is not counted
                raise RuntimeError(f"{do} wrote {made} tokens, not {whole}")

        workers = [threading.Thread(target=_kept(one, failures), args=(question,)) for question in asked]
        start_s = time.perf_counter()
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        if failures:
            raise failures.pop()
        return time.perf_counter() - start_s

    failures: list[Exception] = []

    def plans(questions: list[str]) -> dict[str, float]:
        sot, shares = SpecSoT(engine, tokenizer), {"valid": 0, "direct": 0, "error": 0, "valid without the grammar": 0}
        for first in range(0, len(questions), AT_ONCE):
            some = questions[first : first + AT_ONCE]
            asked = [sot._chat(ask_for_plan(question)) for question in some]
            held = [sot.skeleton_prefill(ids, None, PLAN_TOKENS) for ids in asked]
            free = engine.generate(asked, SamplingParams(PLAN_TOKENS, stop_token_ids=sot._ends))
            for question, ids, one, other in zip(some, asked, held, free, strict=True):
                text = sot.skeleton_decode(ids, one, None, PLAN_TOKENS).skeleton_text
                one.request.cancel()
                shares[_kind(sot, text, question)] += 1
                text = tokenizer.decode(other.token_ids, skip_special_tokens=True)
                shares["valid without the grammar"] += _kind(sot, text, question) == "valid"
        return {name: value / len(questions) for name, value in shares.items()}

    def answer(request: dict[str, Any]) -> Any:
        if request["do"] == "plans":
            return plans(request["questions"])
        return answer_all(**request)

    answer.close = stack.close  # type: ignore[attr-defined]
    return answer


def _kept(work: Callable[[str], None], failures: list[Exception]) -> Callable[[str], None]:
    def run(question: str) -> None:
        try:
            work(question)
        except Exception as error:
            failures.append(error)

    return run


def _kind(sot: Any, text: str, question: str) -> str:
    """valid, direct or error. A plan from which points were left out is an error here."""
    found = sot.skeleton_parse(text, question)
    if found.mode != "plan":
        return found.mode
    return "valid" if len(found.tasks) == len(text.strip().splitlines()) else "error"


if __name__ == "__main__":
    main()
