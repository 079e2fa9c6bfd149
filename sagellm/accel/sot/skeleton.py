"""The plan of an answer: what the model is asked for, the form that its output is held to, and how it is read.

A plan is a list of 2 to 12 points, each with a number of words, or the word `direct`. Two examples in the prompt show both
(Ning et al., Skeleton-of-Thought, 2024).
"""

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from sagellm.accel.sot.results import SkeletonParseResult, TaskData
from sagellm.core.running import PaddedPrompt

__all__ = [
    "MAX_POINTS", "MIN_POINTS", "DistinctPoints", "ask_for_plan", "ask_for_point", "heading", "lead", "parse_plan",
    "plan_pattern", "plan_patterns", "plan_tokens",
]  # fmt: skip

MIN_POINTS, MAX_POINTS = 2, 12
MIN_WORDS, MAX_WORDS = 25, 200
TOKENS_PER_WORD = 1.5  # of English, with some room
TITLE = r"[A-Z][A-Za-z]+( [A-Za-z'-]+){0,6}"  # up to 7 words; with limits of letters a grammar takes minutes to compile
MAX_TITLE = 12  # tokens
NUMBER = re.compile(r"(^|\n)\d+\. ?$")  # a title comes next
END_OF_NUMBER, OTHER = re.compile(r"[\d. \n]*$"), "-"
LINE = re.compile(r"(\d+)\. (.+) \((\d+)\)")

REQUEST = """\
Plan the answer to a question. Write 2 to 12 short points that differ, one on each line, each with its number of words in \
brackets. If one short sentence answers the question, write: direct
"""
TRIAL = "1. Opening statements (40)\n2. Evidence and witnesses (60)\n3. Closing arguments (40)\n4. The verdict (30)"
EXAMPLES = (("What is the capital of France?", "direct"), ("How does a court trial work?", TRIAL))
POINT = "Now write one paragraph of about {words} words about this point: {title}."


def ask_for_plan(question: str) -> list[str]:
    """Return turns of a conversation, the user's and the assistant's: the examples and the question.

    Small models copy points from examples that stand in the same turn as the question.
    """
    turns = [text for asked, plan in EXAMPLES for text in (f"Question: {asked}", plan)]
    turns[0] = f"{REQUEST}\n{turns[0]}"
    return [*turns, f"Question: {question}"]


def ask_for_point(task: TaskData) -> str:
    return POINT.format(title=task.title, words=round(task.num_tokens / TOKENS_PER_WORD))


def lead(task: TaskData) -> str:
    """Return how the text of a point begins. Without it small models write a list once more."""
    title = task.title
    if title[1:2].islower():
        title = title[0].lower() + title[1:]
    return f"When it comes to {title},"


def heading(task: TaskData) -> str:
    """Return the text of the answer between the tokens of two points."""
    return ("" if task.branch_id == 0 else "\n\n") + f"{task.branch_id + 1}. {task.title}\n{lead(task)}"


class PlanTokens:
    """Texts of the tokens of a plan, as far as they tell where a title begins.

    A processor of scores travels to the engine process, where it must not bring the whole tokenizer.

    Attributes:
        brackets: tokens that end a title.
    """

    def __init__(self, tokenizer: Any) -> None:
        texts = tokenizer.batch_decode([[token] for token in range(len(tokenizer))])
        ends = {token: END_OF_NUMBER.search(text)[0] for token, text in enumerate(texts)}  # type: ignore[index]
        self._ends = {token: end if end == texts[token] else OTHER + end for token, end in ends.items() if end}
        self.brackets = [token for token, text in enumerate(texts) if text.strip(" ") == "("]

    def begins_title(self, plan: Sequence[int]) -> bool:
        """Whether a title comes next."""
        tail = ""
        for token in reversed(plan):
            end = self._ends.get(token, OTHER)
            tail = end + tail
            if OTHER in end or "\n" in end:
                return NUMBER.search(tail) is not None
        return NUMBER.search(tail) is not None


@lru_cache(maxsize=4)
def plan_tokens(tokenizer: Any) -> PlanTokens:
    """Return those of a tokenizer. Reads its whole vocabulary once."""
    return PlanTokens(tokenizer)


class DistinctPoints:
    """A processor of scores: no title of a plan begins with a token that an earlier title begins with, and none is long.

    Small models would write the same point again and again, or the same letter.

    Args:
        prompt: token ids; the plan follows them.
    """

    def __init__(self, tokens: PlanTokens, prompt: Sequence[int]) -> None:
        self._tokens, self._prompt = tokens, PaddedPrompt.of(prompt)

    def __call__(self, tokens: Any, scores: Any) -> Any:
        plan = tokens[self._prompt.end(tokens) :].tolist()
        places = [place for place in range(len(plan) + 1) if self._tokens.begins_title(plan[:place])]
        used = [plan[place] for place in places if place < len(plan)]
        is_title = bool(places) and not set(plan[places[-1] :]) & set(self._tokens.brackets)
        if places and places[-1] == len(plan) and used:
            scores = scores.clone()
            scores[used] = -float("inf")
        elif is_title and len(plan) - places[-1] >= MAX_TITLE and self._tokens.brackets:
            kept = scores[self._tokens.brackets]
            scores = scores.new_full(scores.shape, -float("inf"))
            scores[self._tokens.brackets] = kept
        return scores


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


def plan_patterns() -> list[str]:
    """Return the patterns of all plans, to be compiled ahead. Each takes a second of processor time for 49,000 tokens."""
    return [plan_pattern(may_be_direct) for may_be_direct in (True, False)]


def parse_plan(skeleton_text: str, task_prompt: str) -> SkeletonParseResult:
    """Read a plan. A point that comes again is left out, and numbers of words beyond the limits are moved to them.

    Args:
        task_prompt: the question.
    """
    text = skeleton_text.strip()
    if text == "direct":
        return SkeletonParseResult("direct")
    tasks: list[TaskData] = []
    seen: set[str] = set()
    lines = [line for line in text.splitlines() if line.strip()]
    for number, line in enumerate(lines, 1):
        found = LINE.fullmatch(line.strip())
        if found is None or int(found[1]) != number:
            return _error(f"line {number} of the plan is {line[:60]!r}; a point is `{number}. Title (words)`")
        title = found[2].strip()
        if title.lower() not in seen:
            seen.add(title.lower())
            words = min(max(int(found[3]), MIN_WORDS), MAX_WORDS)
            tasks.append(TaskData(len(tasks), title, round(words * TOKENS_PER_WORD)))
    if not MIN_POINTS <= len(tasks) <= MAX_POINTS or len(lines) > MAX_POINTS:
        what = f"the plan for {task_prompt[:60]!r} has {len(lines)} points, {len(tasks)} of them different"
        return _error(f"{what}; allowed are {MIN_POINTS} to {MAX_POINTS}")
    return SkeletonParseResult("plan", tuple(tasks), tuple(map(ask_for_point, tasks)))


def _error(message: str) -> SkeletonParseResult:
    return SkeletonParseResult("error", error_msg=message)
