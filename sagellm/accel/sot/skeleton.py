"""The plan of an answer: what the model is asked for, the form that its output is held to, and how it is read.

A plan is a list of 2 to 12 points, each with a number of words, or the word `direct`. Two examples in the prompt show both
(Ning et al., Skeleton-of-Thought, 2024).
"""

import re
from typing import Any

from sagellm.accel.sot.results import SkeletonParseResult, TaskData

__all__ = ["MAX_POINTS", "MIN_POINTS", "DistinctPoints", "ask_for_plan", "ask_for_point", "parse_plan", "plan_pattern"]

MIN_POINTS, MAX_POINTS = 2, 12
MIN_WORDS, MAX_WORDS = 10, 200
TOKENS_PER_WORD = 1.5  # of English, with some room
TITLE = r"[A-Z][A-Za-z]+( [A-Za-z'-]+){0,6}"  # up to 7 words
NUMBER = re.compile(r"(^|\n)\d+\. ?$")  # a title comes next
LINE = re.compile(r"(\d+)\. (.+) \((\d+)\)")

REQUEST = """\
Plan the answer to a question. Write 2 to 12 short points that differ, one on each line, each with its number of words in \
brackets. If one short sentence answers the question, write: direct

Question: How do I stay healthy?
1. Eat balanced meals (40)
2. Move every day (30)
3. Sleep eight hours (30)

Question: What is the capital of France?
direct

Question: {question}"""
POINT = "In one paragraph of about {words} words: {title}. The question was: {question}"


def ask_for_plan(question: str) -> str:
    return REQUEST.format(question=question)


def ask_for_point(task: TaskData, question: str) -> str:
    return POINT.format(title=task.title, words=round(task.num_tokens / TOKENS_PER_WORD), question=question)


class DistinctPoints:
    """A processor of scores: no title of a plan begins with a token that an earlier title begins with.

    Small models would write the same point again and again.

    Args:
        prompt_tokens: length of the prompt; the plan follows it.
    """

    def __init__(self, tokenizer: Any, prompt_tokens: int) -> None:
        self._tokenizer, self._prompt_tokens = tokenizer, prompt_tokens

    def __call__(self, tokens: Any, scores: Any) -> Any:
        plan = [int(token) for token in tokens[self._prompt_tokens :]]
        texts = [self._tokenizer.decode(plan[:end]) for end in range(len(plan) + 1)] if self._begins(plan) else []
        used = [plan[place] for place, text in enumerate(texts[:-1]) if NUMBER.search(text)]
        if used:
            scores = scores.clone()
            scores[used] = -float("inf")
        return scores

    def _begins(self, plan: list[int]) -> bool:
        return NUMBER.search(self._tokenizer.decode(plan)) is not None


def plan_pattern(may_be_direct: bool = True) -> str:
    """Return a regular expression of whole plans, for structured output.

    Args:
        may_be_direct: whether the model may choose to answer without a plan.
    """
    lines = [rf"{number}\. {TITLE} \([1-9][0-9]{{1,2}}\)" for number in range(1, MAX_POINTS + 1)]
    more = ""
    for line in reversed(lines[MIN_POINTS:]):
        more = rf"(\n{line}{more})?"
    first = r"\n".join(lines[:MIN_POINTS])
    return f"({first}{more})|(direct)" if may_be_direct else f"{first}{more}"


def parse_plan(skeleton_text: str, task_prompt: str, instruction_len: int = 0) -> SkeletonParseResult:
    """Read a plan. A point that comes again is left out, and numbers of words beyond the limits are moved to them.

    Args:
        task_prompt: the question.
    """
    text = skeleton_text.strip()
    if text == "direct":
        return SkeletonParseResult("direct", instruction_len=instruction_len)
    tasks: list[TaskData] = []
    seen: set[str] = set()
    lines = [line for line in text.splitlines() if line.strip()]
    for number, line in enumerate(lines, 1):
        found = LINE.fullmatch(line.strip())
        if found is None or int(found[1]) != number:
            return _error(f"line {number} of the plan is {line[:60]!r}; a point is `{number}. Title (words)`", instruction_len)
        title = found[2].strip()
        if title.lower() not in seen:
            seen.add(title.lower())
            words = min(max(int(found[3]), MIN_WORDS), MAX_WORDS)
            tasks.append(TaskData(len(tasks), title, round(words * TOKENS_PER_WORD)))
    if not MIN_POINTS <= len(tasks) <= MAX_POINTS or len(lines) > MAX_POINTS:
        what = f"the plan for {task_prompt[:60]!r} has {len(lines)} points, {len(tasks)} of them different"
        return _error(f"{what}; allowed are {MIN_POINTS} to {MAX_POINTS}", instruction_len)
    wanted = tuple(ask_for_point(task, task_prompt) for task in tasks)
    return SkeletonParseResult("plan", tuple(tasks), wanted, instruction_len)


def _error(message: str, instruction_len: int) -> SkeletonParseResult:
    return SkeletonParseResult("error", instruction_len=instruction_len, error_msg=message)
