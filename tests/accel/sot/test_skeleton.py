"""Plans: the form they are held to, and how they are read."""

import re

import pytest
import torch
from transformers import AutoTokenizer

from sagellm.accel.sot.results import BranchInfo
from sagellm.accel.sot.schedules import even, longest_first
from sagellm.accel.sot.skeleton import MAX_POINTS, MAX_TITLE, DistinctPoints, parse_plan, plan_pattern, plan_tokens
from sagellm.demo_model import ensure_demo_model

QUESTION = "How do I stay healthy?"
GOOD = "1. Eat well (40)\n2. Move every day (30)\n3. Sleep (30)"


def lines(count: int) -> str:
    return "\n".join(f"{number}. Point {'a' * number} (20)" for number in range(1, count + 1))


def test_a_plan():
    found = parse_plan(GOOD, QUESTION)
    assert (found.mode, found.error_msg) == ("plan", "")
    assert [(task.branch_id, task.title, task.num_tokens) for task in found.tasks] == [
        (0, "Eat well", 60), (1, "Move every day", 45), (2, "Sleep", 45),
    ]  # fmt: skip
    assert all(task.title in text for task, text in zip(found.tasks, found.clean_branches, strict=True))
    assert parse_plan(" direct\n", QUESTION).mode == "direct"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "0 points, 0 of them different; allowed are 2 to 12"),
        ("1. Alone (40)", "1 points, 1 of them different"),
        ("1. Same (40)\n2. same (40)\n3. Same (10)", "3 points, 1 of them different"),
        (lines(1000), "1000 points, 1000 of them different"),
        ("1. Eat (40)\n  1.1 Fruit (20)", "line 2 of the plan is '  1.1 Fruit (20)'"),
        ("1. Eat (40)\n2.  (20)", "line 2 of the plan is '2.  (20)'"),
        ("1. Eat (40)\n3. Sleep (20)", "line 2 of the plan is '3. Sleep (20)'"),
        ("1. Eat (40)\n2. Sle", "line 2 of the plan is '2. Sle'; a point is `2. Title"),
        ("I would rather not.", "line 1 of the plan is 'I would rather not.'"),
    ],
)  # fmt: skip
def test_a_plan_of_no_use(text, why):
    found = parse_plan(text, QUESTION)
    assert found.mode == "error" and why in found.error_msg and not found.tasks


def test_points_that_come_again_are_left_out_and_lengths_have_limits():
    found = parse_plan("1. Eat (1)\n2. EAT (40)\n3. Sleep (999)", QUESTION)
    assert [(task.branch_id, task.title, task.num_tokens) for task in found.tasks] == [(0, "Eat", 38), (1, "Sleep", 300)]


def test_the_pattern_takes_plans_alone():
    pattern = re.compile(plan_pattern())
    for good in (GOOD, "direct", "1. Eat well (40)\n2. Sleep (30)"):
        assert pattern.fullmatch(good) and parse_plan(good, QUESTION).mode != "error"
    one_digit, small = "1. Eat (4)\n2. Sleep (30)", "1. eat (40)\n2. Sleep (30)"
    for bad in ("", "1. Alone (40)", "1. Eat (40)\n3. Sleep (30)", one_digit, GOOD + "\n", small):
        assert not pattern.fullmatch(bad), bad
    titles = ["Point " + "x" * number for number in range(1, MAX_POINTS + 2)]
    longest = [f"{number}. {title} (20)" for number, title in enumerate(titles, 1)]
    assert pattern.fullmatch("\n".join(longest[:-1])) and not pattern.fullmatch("\n".join(longest))
    assert not re.fullmatch(plan_pattern(may_be_direct=False), "direct")


def test_schedules():
    infos = [BranchInfo(number, "", (), length) for number, length in enumerate((10, 50, 20, 40, 30))]
    assert even(infos, 2, 3).devices == ((0, 2, 4), (1, 3)) and even(infos, 2, 3).max_parallel == 3
    assert longest_first(infos, 1, 3).devices == ((1, 3, 4, 2, 0),)
    assert longest_first(infos, 2, 3).devices == ((1, 2, 0), (3, 4))


@pytest.fixture
def tokenizer():
    return AutoTokenizer.from_pretrained(ensure_demo_model())


@pytest.mark.parametrize("padding", [[], [0] * 5])
def test_titles_begin_in_different_ways(tokenizer, padding):
    """Each beginning of a plan, beside a look at its text."""
    prompt = tokenizer("Plan it.").input_ids
    processor, scores = DistinctPoints(plan_tokens(tokenizer), prompt), torch.zeros(len(tokenizer))
    plan = tokenizer("1. Eat well (40)\n2. Move 3. times (30)\n3. Sleep (30)", add_special_tokens=False).input_ids
    used, num_titles = set(), 0
    for end in range(len(plan)):
        is_title = re.search(r"(^|\n)\d+\. ?$", tokenizer.decode(plan[:end])) is not None
        found = processor(torch.tensor([*padding, *prompt, *plan[:end]]), scores)
        barred = set(torch.nonzero(found == -float("inf")).flatten().tolist())
        assert barred == (used if is_title else set()), tokenizer.decode(plan[:end])
        used |= {plan[end]} if is_title else set()
        num_titles += is_title
    assert num_titles >= 3


def test_a_title_ends(tokenizer):
    processor, scores = DistinctPoints(plan_tokens(tokenizer), [5]), torch.zeros(len(tokenizer))
    begun = tokenizer("1. Eat (40)\n2. Ea", add_special_tokens=False).input_ids
    letters = tokenizer("s", add_special_tokens=False).input_ids
    for more in range(2 * MAX_TITLE):
        found = processor(torch.tensor([5, *begun, *(more * letters)]), scores)
        allowed = {tokenizer.decode([token]) for token in torch.nonzero(found == 0).flatten().tolist()}
        assert len(allowed) > 2 or (more >= MAX_TITLE - 3 and " (" in allowed | {" " + text for text in allowed})
    assert len(allowed) <= 2
