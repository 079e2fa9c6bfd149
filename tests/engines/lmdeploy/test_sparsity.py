"""Sparse policies in the real engine."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from sagellm.accel import AccelController
from sagellm.accel.sparsity.base import KEY_SUM_UNIT, SparsePolicy, TopBlocks
from sagellm.accel.sparsity.contract import SUITE
from sagellm.accel.sparsity.policies.quest import Quest
from sagellm.accel.sparsity.registry import SPARSITIES, make_sparsity
from sagellm.core.engines import open_engine
from sagellm.core.errors import ConfigError, SageError, SparsityError
from sagellm.engines.base import SamplingParams
from sagellm.engines.lmdeploy.sparsity import SparseSteps
from sagellm.evaluate.forced import answer_after, decode_scores
from tests.engines.lmdeploy.guesses import tokens_of
from tests.engines.lmdeploy.pd.pair import NEW, Pair
from tests.reference import make_prompts
from tests.sweeps import slow_but

PROMPTS = make_prompts((150, 20, 97, 210))
PARAMS = SamplingParams(max_new_tokens=24, ignore_eos=True)
NAMES = ("streaming", "quest", "sketch", "oracle", "random")
SPARSE = {"share": 0.3, "min_blocks": 2}


def answers(engine, prompts=PROMPTS):
    return [one.token_ids for one in engine.generate(prompts, PARAMS)]


@pytest.fixture
def sparse(start_engine):
    """`sparse(policy, options, **config)`: an engine with a policy, or without one."""

    def start(policy: str | None, options: dict | None = None, **config):
        given = {} if policy is None else {"sparsity": policy, "sparsity_options": options or options_of(policy)}
        return start_engine(**given, **{"dtype": "float32", "kv_blocks": 128} | config)

    return start


class BothEnds(SparsePolicy):
    """The choice of `streaming`, made for each layer."""

    name = "both-ends"
    per = "layer"

    def select_blocks(self, view):
        assert view.queries.shape[1:] == (4, 16) and not view.queries.flags.writeable and view.layer in (0, 1)
        found = zip(view.num_blocks.tolist(), view.keep.tolist(), strict=True)
        return [np.r_[: min(1, keep - 1), blocks - keep + min(1, keep - 1) : blocks] for blocks, keep in found]


class AsNative(TopBlocks):
    """The choice of `quest`, in Python."""

    name = "as-native"
    weights, reach = "spread", Quest().reach

    def select_blocks(self, view):
        return view.top()


class FromSummaries(TopBlocks):
    """The choice of `quest`, from the summaries of keys that the view has; mean keys lie between the bounds."""

    name = "from-summaries"
    summaries = ("bounds", "means")

    def select_blocks(self, view):
        weights = np.zeros((len(view.lengths), 2, view.tables.shape[1]), np.float32)
        for row, blocks in enumerate(view.num_blocks.tolist()):
            low, high = view.key_bounds(row)
            mean = view.mean_keys(row)
            assert mean.shape == (blocks, 2, 16) and (mean >= low - KEY_SUM_UNIT).all() and (mean <= high + KEY_SUM_UNIT).all()
            assert (low < high).any() and not view.bounds.flags.writeable and not view.key_sums.flags.writeable
            queries = view.queries[row].reshape(2, -1, 1, 16)
            middle, half = (part.swapaxes(0, 1)[:, None] for part in (mean, (high - low) / 2))
            off = np.sqrt(np.square(queries * half).sum(-1))
            scores = ((queries * middle).sum(-1) + Quest().reach * off) / 4
            each = np.exp(scores - scores.max(-1, keepdims=True))
            weights[row, :, :blocks] = (each / each.sum(-1, keepdims=True)).sum(1)
        return replace(view, weights=weights).top()


class Late(SparsePolicy):
    """Fails in a later step."""

    name = "late"

    def select_blocks(self, view):
        if view.step == 3:
            raise RuntimeError("no more")
        return [np.arange(blocks - keep, blocks) for blocks, keep in zip(view.num_blocks, view.keep, strict=True)]


class Foreign(BothEnds):
    """Names blocks that the sequence does not have."""

    name = "foreign"

    def select_blocks(self, view):
        return [one + 1 for one in super().select_blocks(view)]


def own(kind: type) -> str:
    return f"{__name__}:{kind.__name__}"


def options_of(name: str) -> dict:
    """The tiny models have two layers, so all of them choose."""
    return SPARSE | ({"whole_layers": 0} if name in ("quest", "sketch", "oracle", own(AsNative), own(FromSummaries)) else {})


@pytest.mark.parametrize("name", NAMES)
def test_a_policy_that_reads_everything_changes_nothing_and_one_that_does_not_does(sparse, reference, name):
    expected = reference(PROMPTS, 24)
    assert answers(sparse(name, {"share": 1.0})) == expected
    engine = sparse(name)
    found = answers(engine)
    assert found != expected
    report = engine.hooks.report()["sparsity"]
    assert report["policy"] == name and report["fault"] == "" and report["steps"] == 23
    assert 0.3 * report["held"] < report["read"] < 0.5 * report["held"]


@pytest.mark.parametrize(("one", "other"), [
    ("streaming", own(BothEnds)), ("quest", own(AsNative)), ("quest", own(FromSummaries))
])  # fmt: skip
def test_two_ways_of_one_choice_answer_the_same(sparse, one, other):
    """A shorter block table, or a choice in each layer; natively, or in Python."""
    assert answers(sparse(one)) == answers(sparse(other))


@pytest.mark.parametrize("name", slow_but(["streaming", "quest", "sketch"], "quest"))
@pytest.mark.parametrize("config", [{"kv_schema": "int8"}, {"decode_round": 4}, {"dtype": "bfloat16"}], ids=str)
def test_a_sequence_gets_the_same_answer_alone_again_and_with_its_prefix_cached(sparse, name, config):
    engine = sparse(name, **config)
    expected = answers(engine)
    assert [answers(engine, [prompt])[0] for prompt in PROMPTS] == expected
    assert engine.hooks.report()["prefix"]["hit_tokens"] > 0
    assert answers(sparse(name, prefix_caching=False, **config)) == expected


def test_prompts_of_another_engine(start_engine, reference, tmp_path):
    """The step that takes over a prompt is one of prompts, and reads all of it; those after it do not."""
    settings = dict(dtype="float32", kv_blocks=128, sparsity="streaming", sparsity_options=SPARSE)
    pair = Pair(start_engine, tmp_path, **settings)
    found = tokens_of(pair.ask(PROMPTS))
    assert [one[:2] for one in found] == [one[:2] for one in reference(PROMPTS, 2)]
    report = pair.decode.hooks.report()["sparsity"]
    assert report["sequences"] == len(PROMPTS) * (NEW - 2) and 0 < report["read"] < 0.5 * report["held"]


@pytest.mark.parametrize(("kind", "fault"), [(Late, "raised RuntimeError: no more"), (Foreign, "there are 0 to")])
def test_a_policy_that_fails_is_switched_off_and_steps_read_everything(sparse, reference, caplog, kind, fault):
    engine = sparse(own(kind))
    found = answers(engine)
    assert fault in engine.hooks.report()["sparsity"]["fault"] and "is switched off, steps read all blocks" in caplog.text
    if kind is Foreign:  # from the first step on
        assert found == reference(PROMPTS, 24)
    assert answers(engine) == answers(engine)


def test_scores_of_decode_steps(sparse, reference):
    """Behind forced tokens: those of the whole text where all blocks are read, others where they are not."""
    text = reference(PROMPTS[:1], 12)[0]
    dense, partly = sparse(None), sparse("streaming")
    (scores,) = decode_scores(dense, PROMPTS[:1], [text])
    logits = dense.prompt_logits([*PROMPTS[0], *text])[len(PROMPTS[0]) - 1 : -1]
    exact = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    assert np.abs(scores - exact).max() < 1e-3
    (others,) = decode_scores(partly, PROMPTS[:1], [text])
    assert np.abs(others[0] - exact[0]).max() < 1e-3 and np.abs(others[1:] - exact[1:]).max() > 1e-2
    assert answer_after(dense, PROMPTS[:1], [text[:5]], 7) == [list(text[5:])]


@pytest.mark.parametrize(
    ("name", "config", "fault"),
    [("streaming", {"speculative": "ngram"}, "a guess and its verification could read different blocks"),
     ("quest", {"host_kv_blocks": 32}, "blocks that come from elsewhere have no bounds"),
     ("streaming", {"model": "qwen2-window"}, "has a sliding window of"),
     ("streaming", {"model": "qwen2-window", "tensor_parallel": 2}, "has a sliding window of")],
)  # fmt: skip
def test_settings_that_are_refused(sparse, name, config, fault):
    with pytest.raises(SageError, match=fault):
        sparse(name, **config)


def test_codes_need_heads_of_whole_groups():
    steps = SparseSteps(make_sparsity("sketch"), 64)
    steps.bind(heads=4, kv_heads=2, head_size=10, prompt_tile=48)
    with pytest.raises(SparsityError, match="heads of this model have 10; use quest"):
        steps.check()


def test_options_without_a_policy(start_engine):
    with pytest.raises(ConfigError, match="there is no sparse policy; give --sparsity"):
        start_engine(sparsity_options={"share": 0.5})


def test_a_choice_for_each_layer_needs_the_native_step(sparse, monkeypatch):
    monkeypatch.setattr("sagellm.engines.lmdeploy.cpu.compiled.why_eager", lambda model: "it is asked to")
    with pytest.raises(SparsityError, match="chooses for each head, which only the CPU device's native step can do"):
        sparse("quest")
    with pytest.raises(SparsityError, match="snapkv observes queries, which only"):
        sparse("snapkv", {"share": 0.5})
    with pytest.raises(SparsityError, match="a_shape chooses blocks of prompts, which only"):
        sparse("a_shape", {"share": 0.5})
    assert answers(sparse("streaming")) != answers(sparse(None))


def test_the_policy_of_the_readme(sparse, tmp_path, monkeypatch):
    """Written, checked and run as the page says."""
    readme = (Path(__file__).parents[3] / "sagellm/accel/sparsity/README.md").read_text()
    (tmp_path / "my_policy.py").write_text(re.search(r"```python\n(.*?)```", readme, re.DOTALL)[1])
    monkeypatch.syspath_prepend(tmp_path)
    report = SUITE.prepare(SPARSITIES, "my_policy:Spread", {})()
    assert report.passed, report
    engine = sparse("my_policy:Spread")
    answers(engine)
    found = engine.hooks.report()["sparsity"]
    assert found["read"] < found["held"] and not found["fault"]


def test_the_controller_opens_a_sparse_engine(model_folder):
    controller = AccelController.setup(
        {"enable_sparsity": True, "sparsity_options": {"share": 0.5}}, model=model_folder("llama"), device="cpu", kv_blocks=64
    )
    engine = open_engine(controller.settings)
    try:
        assert engine.hooks.report()["sparsity"]["policy"] == "quest"
    finally:
        engine.close()
