"""Skeleton-of-thought on a running engine."""

import itertools
import json
from dataclasses import replace

import pytest
from click.testing import CliRunner
from transformers import AutoTokenizer

from benchmarks.processes import wait_until
from sagellm.accel.sot import schedules
from sagellm.accel.sot.pipeline import Listener, SpecSoT
from sagellm.accel.sot.results import ScheduleResult, SkeletonParseResult
from sagellm.accel.sot.skeleton import ask_for_plan, plan_patterns
from sagellm.core.errors import ConfigError, EngineError
from sagellm.core.running import SamplingParams
from sagellm.demo_model import ensure_demo_model
from sagellm.engines.lmdeploy.grammars import Grammars
from tests.pool import settle
from tests.sweeps import slow_but

QUESTION = "How do I read a file?"
SIZES = dict(kv_blocks=160, context_length=2048, dtype="float32")


class Shown(SpecSoT):
    """Keeps what the stages return."""

    def __init__(self, *args, **options):
        super().__init__(*args, may_be_direct=False, **options)
        self.seen = {}

    def skeleton_decode(self, *args, **options):
        self.seen["skeleton"] = super().skeleton_decode(*args, **options)
        return self.seen["skeleton"]

    def parallel_prefill(self, *args, **options):
        self.seen.setdefault("forks", []).append(super().parallel_prefill(*args, **options))
        return self.seen["forks"][-1]


class Telling(Listener):
    """Keeps what it hears; calls `on_token` too."""

    def __init__(self, on_token=lambda *_: None):
        self.plans, self.tokens, self.ends, self._on_token = [], [], [], on_token

    def planned(self, tasks):
        self.plans.append(tuple(tasks))

    def token(self, branch_id, token):
        assert self.plans
        self.tokens.append((branch_id, token))
        self._on_token(branch_id, token)

    def ended(self, branch_id, reason):
        self.ends.append((branch_id, reason))


@pytest.fixture
def tokenizer():
    return AutoTokenizer.from_pretrained(ensure_demo_model())


def start(start_engine, **config):
    return start_engine(model=ensure_demo_model(), **SIZES | config)


@pytest.mark.parametrize(
    ("max_parallel", "speculative"),
    slow_but(itertools.product([2, 16], [None, "suffix"]), (2, "suffix"), (16, None)),
)
def test_points_are_those_of_the_same_prompts_alone(start_engine, tokenizer, speculative, max_parallel):
    engine = start(start_engine, speculative=speculative)
    sot, told = Shown(engine, tokenizer), Telling()
    answer = sot.generate(QUESTION, max_new_tokens=24, max_parallel=max_parallel, listener=told)
    assert told.plans == [answer.tasks] and dict(told.ends) == answer.finish_reasons
    assert answer.mode == "plan" and len(answer.tasks) >= 2
    prefix = [*sot._chat(ask_for_plan(QUESTION)), *sot.seen["skeleton"].skeleton_ids]
    prompts, lengths = {}, {task.branch_id: min(24, task.num_tokens) for task in answer.tasks}
    for fork in sot.seen["forks"]:
        assert fork.tips_indices == len(prefix) - 1 and list(fork.input_ids[: len(prefix)]) == prefix
        assert len(fork.branch_ids) <= max_parallel
        for number, begin, length in zip(fork.branch_ids, fork.branch_begins, fork.branch_lengths, strict=True):
            prompts[number] = [*prefix, *fork.input_ids[begin : begin + length]]
    assert sorted(prompts) == sorted(answer.branches) == [task.branch_id for task in answer.tasks]
    for number, prompt in prompts.items():
        params = SamplingParams(lengths[number], stop_token_ids=sot._ends)
        alone = engine.generate([prompt], params)[0].token_ids
        assert answer.branches[number] == sot._without_end(alone)
        assert tuple(token for each, token in told.tokens if each == number) == alone
    places = [answer.text.index(f"{task.branch_id + 1}. {task.title}\n") for task in answer.tasks]
    assert places == sorted(places)
    assert answer.stats["branch_tokens"] == sum(map(len, answer.branches.values()))
    again = sot.generate(QUESTION, max_new_tokens=24, max_parallel=max_parallel)  # guessed from the first answer
    assert again.branches == answer.branches and (again.stats["accepted"] > 0) == (speculative is not None)
    lengths = [len(prompt) - len(prefix) for prompt in prompts.values()]
    asked = len(prefix) - len(sot.seen["skeleton"].skeleton_ids)
    assert answer.stats["prompt_tokens"] == asked + sum(lengths)
    assert answer.stats["completion_tokens"] == len(sot.seen["skeleton"].skeleton_ids) + len(told.tokens)


def test_a_stage_is_replaced_alone(start_engine, tokenizer):
    engine = start(start_engine)
    plain = Shown(engine, tokenizer)
    usual = plain.generate(QUESTION, max_new_tokens=12, max_parallel=1)

    class LastFirst(Shown):
        def schedule_branches(self, branch_infos, use_scheduling, distributed, max_parallel):
            plan = schedules.even(list(reversed(branch_infos)), 1, max_parallel)
            return ScheduleResult(plan, plan.devices[0], tuple(branch_infos))

    class Two(Shown):
        def skeleton_parse(self, skeleton_text, task_prompt):
            found = super().skeleton_parse(skeleton_text, task_prompt)
            return replace(found, tasks=found.tasks[:2], clean_branches=found.clean_branches[:2])

    class Loud(Shown):
        def merge_results(self, *args):
            return self.tokenizer("All:", add_special_tokens=False).input_ids + super().merge_results(*args)

    turned = LastFirst(engine, tokenizer)
    assert turned.generate(QUESTION, max_new_tokens=12, max_parallel=1).branches == usual.branches
    order = [fork.branch_ids for fork in turned.seen["forks"]]
    assert order == [(task.branch_id,) for task in reversed(usual.tasks)]
    assert list(Two(engine, tokenizer).generate(QUESTION, max_new_tokens=12).branches) == [0, 1]
    assert Loud(engine, tokenizer).generate(QUESTION, max_new_tokens=12).text == "All:" + usual.text


def test_without_a_plan_the_answer_is_one_text(start_engine, tokenizer):
    engine = start(start_engine)

    class Useless(SpecSoT):
        def skeleton_parse(self, skeleton_text, task_prompt):
            return SkeletonParseResult("error", error_msg="of no use")

    whole = SpecSoT(engine, tokenizer).generate(QUESTION, enable_parallel=False, max_new_tokens=20)
    found = Useless(engine, tokenizer).generate(QUESTION, max_new_tokens=20)
    assert (found.mode, found.error_msg, found.token_ids) == ("error", "of no use", whole.token_ids)
    assert whole.mode == "direct" and not whole.branches


def test_little_room(start_engine, tokenizer):
    """Branches wait for each other and end; one that can never fit is an error, and gives all back."""
    roomy = Shown(start(start_engine), tokenizer).generate(QUESTION, max_new_tokens=16)
    engine = start(start_engine, kv_blocks=70, context_length=1024, prefix_caching=False)
    assert Shown(engine, tokenizer).generate(QUESTION, max_new_tokens=16).branches == roomy.branches
    sot = Shown(engine, tokenizer)
    with pytest.raises(ConfigError, match=r"branch 0 needs \d+ tokens with the \d+ that are common; max_kv_len is 100\."):
        sot.generate(QUESTION, max_kv_len=100)
    settle(engine)
    assert sot.generate(QUESTION, max_new_tokens=16, max_kv_len=900).branches == roomy.branches


def test_a_failure_in_the_middle_ends_all_branches(start_engine, tokenizer):
    engine = start(start_engine)

    def leave(branch, token):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Shown(engine, tokenizer).generate(QUESTION, max_new_tokens=200, listener=Telling(leave))
    settle(engine)  # and the fixture counts the blocks


def test_grammars_of_plans_are_compiled_ahead(start_engine, tokenizer):
    """A plan then finds what it needs in the compiler's memory."""
    engine = start_engine(model=ensure_demo_model(), **SIZES)
    compiler = engine.engine.executor.model_agent.guided_decoding_manager.compiler
    engine.hooks.grammars.compile_ahead(plan_patterns())
    wait_until("both are compiled", lambda: engine.hooks.grammars.num_compiled == 2)
    before = compiler.get_cache_size_bytes()
    assert before > 0
    for may_be_direct in (True, False):
        SpecSoT(engine, tokenizer, may_be_direct).generate(QUESTION, max_new_tokens=2)
    assert compiler.get_cache_size_bytes() == before
    with pytest.raises(EngineError, match="where the engine computes in one process"):
        Grammars(executor=None).compile_ahead(plan_patterns())


def test_bad_input(start_engine, tokenizer):
    engine = start(start_engine)
    sot = Shown(engine, tokenizer)
    with pytest.raises(ConfigError, match="the question is empty"):
        sot.generate("  ")
    with pytest.raises(EngineError, match="allowed are 1 to"):
        sot.generate("word " * 4000)
    with pytest.raises(EngineError, match="there is no plan to fork"):
        sot.parallel_prefill([1], [[2]], [0], 4)
    with pytest.raises(EngineError, match=r"pattern '\(' cannot be compiled"):
        engine.generate([[5, 6]], SamplingParams(4, pattern="("))
    tokenizer.chat_template = None
    with pytest.raises(ConfigError, match="needs a model with a chat template"):
        SpecSoT(engine, tokenizer)


def test_the_command(tmp_path):
    from sagellm.cli.sot import sot

    arguments = [QUESTION, "--model", "demo", "--device", "cpu", "--threads", "1", "--always-plan", "--max-tokens", "8"]
    found = CliRunner().invoke(sot, [*arguments, "--json", "--plot", tmp_path / "answer.png"])
    answer = json.loads(found.stdout)
    assert found.exit_code == 0 and answer["mode"] == "plan" and len(answer["branches"]) == len(answer["tasks"])
    assert (tmp_path / "answer.png").read_bytes().startswith(b"\x89PNG")
    shown = CliRunner().invoke(sot, [*arguments, "--show", "tree"])
    heads = [f"{task['branch_id'] + 1}. {task['title'][:20]}" for task in answer["tasks"]]
    assert shown.exit_code == 0 and all(head in shown.output for head in heads)
