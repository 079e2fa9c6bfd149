"""A draft model beside the target: the tokens are those of the target alone, and what it knows of a text stays right."""

import json
import re
import shutil

import numpy as np
import pytest

from sagellm.accel.speculative.base import Ask
from sagellm.accel.speculative.draft_model import DraftModelStrategy
from sagellm.accel.speculative.registry import find_speculator, speculator_names
from sagellm.core.config import SageConfig
from sagellm.core.errors import CapacityError, SpeculationError
from sagellm.demo_model.random_model import write_random_model
from sagellm.engines.base import SamplingParams
from sagellm.engines.lmdeploy.engine import LMDeployEngine, hook_config
from sagellm.engines.lmdeploy.settings_plugins import check_settings_plugins
from sagellm.engines.lmdeploy.sizing import gpu_share, size_engine
from sagellm.engines.lmdeploy.speculative import draft_folder, methods
from sagellm.engines.lmdeploy.speculative.methods import speculative_config
from sagellm.models.folder import num_weights
from tests.accel.speculative.contract import bad_drafts
from tests.conftest import SHAPE
from tests.pool import settle
from tests.reference import make_prompts

NUM_NEW = 40
GREEDY = SamplingParams(max_new_tokens=NUM_NEW, ignore_eos=True)
PROMPTS = make_prompts((5, 40, 100, 33, 90, 64, 70, 20))
LOOKAHEAD = 3


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """A smaller random model: nearly all it guesses is wrong."""
    shape = SHAPE | {"hidden_size": 32, "num_layers": 1}
    return write_random_model(tmp_path_factory.mktemp("draft"), **shape, seed=5)


def start(start_engine, draft, **config):
    options = {"model": str(draft), "lookahead": LOOKAHEAD} | config.pop("options", {})
    return start_engine(speculative="draft", speculative_options=options, **config)


def answers(engine, prompts=PROMPTS, params=GREEDY):
    found = [generation.token_ids for generation in engine.generate(prompts, params)]
    settle(engine)
    return found


def speculation(engine):
    report = engine.hooks.report()["speculation"]
    assert report["faults"] == 0, report["first_fault"]
    return report


@pytest.mark.parametrize("decode_round", [1, 3])
@pytest.mark.parametrize("kv_blocks", [64, 30])
def test_the_target_as_its_own_draft_is_always_right(start_engine, reference, model_folder, decode_round, kv_blocks):
    engine = start(start_engine, model_folder("llama"), decode_round=decode_round, kv_blocks=kv_blocks)
    assert answers(engine) == reference(PROMPTS, NUM_NEW)
    assert (engine.hooks.report()["preempted"] > 0) == (kv_blocks == 30)
    if kv_blocks == 64:
        report = speculation(engine)
        assert report["tokens_per_step"] > LOOKAHEAD
        # No token is computed twice by the draft, guesses that were right included.
        assert report["own"]["tokens"] <= sum(len(prompt) + NUM_NEW for prompt in PROMPTS)
    assert answers(engine) == reference(PROMPTS, NUM_NEW)
    assert engine.hooks.report()["prefix"]["hit_tokens"] > 0
    report = speculation(engine)
    assert report["accepted"] == report["drafted"] > 0


def test_a_draft_that_is_wrong_costs_no_token(start_engine, reference, other):
    engine = start(start_engine, other, kv_blocks=30)
    assert answers(engine) == reference(PROMPTS, NUM_NEW)
    report = speculation(engine)
    assert engine.hooks.report()["preempted"] > 0
    assert report["drafted"] > 300 and report["acceptance"] < 0.1


def test_prompts_are_read_in_bounded_steps_and_unlikely_guesses_left_out(start_engine, reference, model_folder):
    options = {"step_tokens": 24, "min_probability": 0.5, "lookahead": 8}
    engine = start(start_engine, model_folder("llama"), options=options)
    seen = []
    runner = engine.engine.executor.model_agent.agent_strategy.speculator.strategy._runner
    forward = runner.forward_scored

    def scored(tokens, num_before, blocks):
        seen.append(([len(row) for row in tokens], forward(tokens, num_before, blocks)))
        return seen[-1][1]

    runner.forward_scored = scored
    assert answers(engine) == reference(PROMPTS, NUM_NEW)
    report = speculation(engine)
    # Long rows are of prompts: at most 24 tokens of prompts at once. A step of the target gives at most 9 tokens.
    assert max(sum(length for length in lengths if length > 9) for lengths, _ in seen) == 24
    assert report["accepted"] == report["drafted"] > 0
    unlikely = sum(int((probabilities < 0.5).sum()) for _, (_, probabilities) in seen)
    assert unlikely > 20 and all(0 < p <= 1 for _, (_, probabilities) in seen for p in probabilities)


def test_sampling_keeps_its_tokens(start_engine, model_folder):
    params = SamplingParams(max_new_tokens=NUM_NEW, ignore_eos=True, temperature=0.7, top_k=5, seed=3)
    expected = answers(start_engine(), params=params)
    engine = start(start_engine, model_folder("llama"), decode_round=3)
    assert answers(engine, params=params) == expected
    assert 0 < speculation(engine)["accepted"] < speculation(engine)["drafted"]


@pytest.mark.parametrize(("kind", "says"), [
    (bad_drafts.KeepsRejected, ""), (bad_drafts.BlocksOfAnother, ""), (bad_drafts.ForeignBlocks, "block 1000"),
    (bad_drafts.NegativeBlocks, "block -"), (bad_drafts.TooFewBlocks, "do not fit"), (bad_drafts.ForeignTokens, "token -999"),
], ids=lambda value: getattr(value, "__name__", ""))  # fmt: skip
def test_who_misuses_the_draft_model_changes_no_token(start_engine, reference, model_folder, kind, says):
    options = {"model": str(model_folder("llama")), "lookahead": LOOKAHEAD}
    engine = start_engine(speculative=f"{kind.__module__}:{kind.__name__}", speculative_options=options, kv_blocks=30)
    assert answers(engine) == reference(PROMPTS, NUM_NEW)
    assert answers(engine, PROMPTS[:2]) == reference(PROMPTS[:2], NUM_NEW)
    report = engine.hooks.report()["speculation"]
    assert says in report["first_fault"] and bool(says) == (report["faults"] > 0), report["first_fault"]
    assert says or report["drafted"] > 100


class FakeRunner:
    """Guesses last token + 1, and remembers what it was given."""

    vocab_size = 1000

    def __init__(self):
        self.calls = []

    def forward(self, token_ids, num_before, blocks):
        self.calls.append([(before, row.tolist()) for row, before in zip(token_ids, num_before, strict=True)])
        return np.array([row[-1] + 1 for row in token_ids])


class FakeTarget:
    block_size = 4

    def __init__(self):
        self.runner = FakeRunner()

    def load(self, folder):
        return self.runner


def ask(tokens, blocks=(7, 8, 9), limit=3, request=1):
    return Ask(request, np.array(tokens), limit, np.array(blocks))


def bound(**options):
    strategy, target = DraftModelStrategy("draft", lookahead=3, **options), FakeTarget()
    strategy.bind(target)
    return strategy, target.runner.calls


def test_only_what_is_missing_is_computed():
    strategy, calls = bound()
    text = [1, 2, 3, 4, 5]
    assert strategy.propose([ask(text)]) == [[6, 7, 8]]
    assert calls == [[(0, text)], [(5, [6])], [(6, [7])]]
    calls.clear()
    # All right: the last guess was never computed. Then one right, then none.
    assert strategy.propose([ask([*text, 6, 7, 8, 50])]) == [[51, 52, 53]]
    assert calls[0] == [(7, [8, 50])]
    assert strategy.propose([ask([*text, 6, 7, 8, 50, 51, 60], limit=1)]) == [[61]]
    assert calls[3] == [(10, [60])]
    calls.clear()
    assert strategy.propose([ask([*text, 6, 7, 8, 50, 51, 60, 70])]) == [[71, 72, 73]]
    assert calls[0] == [(11, [70])]
    calls.clear()
    # The second block is another one: what was in it is gone, and all behind it.
    assert strategy.propose([ask([*text, 6, 7, 8, 50, 51, 60, 70], (7, 5, 9), 1)]) == [[71]]
    assert calls == [[(4, [5, 6, 7, 8, 50, 51, 60, 70])]]
    calls.clear()
    strategy.begin(1, np.array(text))
    strategy.propose([ask(text, (7, 5, 9), 1)])
    assert calls == [[(0, text)]]
    strategy.end(1)
    strategy.end(2)
    assert not strategy._known


def test_a_long_prompt_does_not_hold_up_the_others():
    strategy, calls = bound(step_tokens=6)
    long, short = list(range(100, 110)), [1, 2]
    asks = [ask(long, (1, 2, 3), request=1), ask(short, (4,), 1, request=2)]
    assert strategy.propose(asks) == [[], [3]]
    assert calls == [[(0, long[:6]), (0, short)]]
    assert strategy.propose(asks) == [[110, 111, 112], [3]]
    assert calls[1:] == [[(6, long[6:]), (1, [2])], [(10, [110])], [(11, [111])]]


@pytest.mark.parametrize(
    ("change", "message"),
    [({"model": None}, "draft has no model; give the folder of a draft model: --speculative-options '{\"model\": \"FOLDER\"}'"),
     ({"model": ""}, "model is ''; give the folder"),
     ({"min_probability": 1.0}, "min_probability is 1.0; give a number from 0"),
     ({"step_tokens": 0}, "step_tokens is 0; give a whole number"), ({"lookahead": 0}, "lookahead is 0")],
)  # fmt: skip
def test_options_out_of_range(change, message):
    with pytest.raises(SpeculationError, match=re.escape(message)):
        DraftModelStrategy(**{"model": "draft"} | change)


def test_another_vocabulary_is_refused_before_anything_is_loaded(tmp_path, model_folder, other):
    target = model_folder("llama")

    def refused(draft, message):
        config = SageConfig(device="cpu", speculative="draft", speculative_options={"model": str(draft)})
        with pytest.raises(SpeculationError, match=message):
            size_engine(config, target, "cpu")

    wide = write_random_model(tmp_path / "wide", **SHAPE | {"vocab_size": 330})
    refused(wide, "another tokenizer .*: 10 tokens differ, first 320, which is .*w320. there and None here")
    refused(tmp_path / "none", "none has no config.json; give a local Hugging Face model folder")
    named = shutil.copytree(other, tmp_path / "named")
    (named / "model.safetensors").unlink()
    refused(named, "named has no weights")
    shutil.copy(other / "model.safetensors", named)
    file = named / "tokenizer.json"
    content = json.loads(file.read_text())
    vocab = content["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    file.write_text(json.dumps(content))
    refused(named, f"another tokenizer .*: 2 tokens differ, first {vocab['b']}, which is 'b' there and 'a' here")
    file.write_text("{}")
    refused(named, "cannot be read as a tokenizer")
    file.unlink()
    (wide / "tokenizer.json").unlink()
    refused(wide, "has a vocabulary of 330 tokens, .* one of 320, and their tokenizers cannot be compared; give a draft model")


def test_tokenizers_are_compared_by_whatever_files_they_have(tmp_path, model_folder, other, caplog):
    target, vocab = model_folder("llama"), {}

    def accepted(draft, model=target):
        caplog.clear()
        size_engine(SageConfig(speculative="draft", speculative_options={"model": str(draft)}), model, "cpu")
        return not caplog.records

    def refused(draft, model, message):
        with pytest.raises(SpeculationError, match=message):
            accepted(draft, model)

    def without_json(name):
        folder = shutil.copytree(other, tmp_path / name)
        vocab.update({token: number for number, token in draft_folder._tokens(folder).items()})
        (folder / "tokenizer.json").unlink()
        return folder

    bare = without_json("bare")
    assert not accepted(bare) and "tokenizers of the draft model" in caplog.text and "cannot be compared" in caplog.text

    listed, swapped = without_json("listed"), without_json("swapped")
    (listed / "vocab.json").write_text(json.dumps(vocab))
    assert accepted(listed)
    (swapped / "vocab.json").write_text(json.dumps(vocab | {"a": vocab["b"], "b": vocab["a"]}))
    refused(swapped, target, "another tokenizer .*: 2 tokens differ")
    refused(swapped, listed, "another tokenizer .*: 2 tokens differ")

    # Vocabularies that only a tokenizer's own code can read.
    made, other_made = without_json("made"), without_json("other_made")
    for folder, words in ((made, "abc"), (other_made, "acb")):
        (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]))
        (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer"}))
    assert accepted(made, made)
    refused(other_made, made, "2 tokens differ, first 6, which is 'c' there and 'b' here")

    pieces = [without_json(name) for name in ("pieces", "more_pieces")]
    for folder in pieces:
        (folder / "tokenizer.model").write_bytes(b"pieces that nobody here can read")
    assert accepted(*pieces)
    (pieces[0] / "tokenizer.model").write_bytes(b"others")
    assert not accepted(*pieces)


@pytest.mark.parametrize("sizes", [(384, 320), (320, 384), (384, 400)])
def test_the_same_tokenizer_in_vocabularies_that_are_padded_otherwise(tmp_path, model_folder, sizes):
    """As models of one family are. Drawn at random, tokens of the padding occur as well: of the target's alone, where it has
    more; its draft then has no guess for that text."""
    tokenizer = model_folder("llama")
    draft, target = (
        write_random_model(tmp_path / f"{name}{size}", **SHAPE | {"vocab_size": size}, tokenizer_from=tokenizer)
        for name, size in zip(("draft", "target"), sizes, strict=True)
    )
    params = [SamplingParams(max_new_tokens=NUM_NEW, ignore_eos=True, **values) for values in (
        {}, dict(temperature=1.0, seed=1), dict(temperature=1.5, seed=2), dict(temperature=2.0, seed=3),
    )] * 2  # fmt: skip
    found = []
    for options in ({}, {"speculative": "draft", "speculative_options": {"model": str(draft), "lookahead": LOOKAHEAD}}):
        settings = dict(device="cpu", threads=1, block_size=16, kv_blocks=64, max_batch_size=8, model=target)
        with LMDeployEngine(SageConfig(**settings, **options)) as engine:
            found.append(answers(engine, params=params))
            if options:
                assert speculation(engine)["drafted"] > 50
                guesses = engine.engine.executor.model_agent.agent_strategy.speculator.strategy._runner._num_guessable
                assert guesses == min(sizes)
    assert found[0] == found[1]
    if sizes[0] < sizes[1]:
        assert max(map(max, found[0])) >= sizes[0], "tokens that the draft model has not"


def test_a_model_that_the_device_cannot_run(start_engine, other, tmp_path):
    odd = shutil.copytree(other, tmp_path / "odd")
    config = json.loads((odd / "config.json").read_text())
    (odd / "config.json").write_text(json.dumps(config | {"architectures": ["NobodyForCausalLM"]}))
    with pytest.raises(SpeculationError, match="odd cannot be run on cpu beside the target: .*NobodyForCausalLM"):
        start(start_engine, odd)


def test_its_memory_is_counted(monkeypatch, model_folder, other):
    free = 2**26
    monkeypatch.setattr("sagellm.engines.lmdeploy.cpu.runtime.memory_bytes", lambda: (free, free))
    alone = SageConfig(device="cpu", max_batch_size=10_000)
    both = alone.model_copy(update={"speculative": "draft", "speculative_options": {"model": str(other)}})
    target = model_folder("llama")
    sizes = size_engine(both, target, "cpu")
    # One layer of two heads of 8, against two layers of two heads of 16; float32 weights could be twice what is stored.
    assert sizes.draft.block_bytes == sizes.schema.block_bytes // 4
    assert sizes.draft.weight_bytes == 4 * num_weights(other)
    blocks = size_engine(alone, target, "cpu").num_blocks
    assert sizes.num_blocks == pytest.approx(blocks * 4 / 5, abs=1)
    with pytest.raises(CapacityError):
        size_engine(both.model_copy(update={"kv_blocks": free // sizes.schema.block_bytes * 9 // 10}), target, "cpu")
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda: (1000 * sizes.draft.weight_bytes, 0))
    assert gpu_share(None, size_engine(alone, target, "cuda")) == 0.8
    assert gpu_share(0.5, size_engine(both, target, "cuda")) == pytest.approx(0.4995 * 4 / 5)  # stored in 32 bits
    with pytest.raises(CapacityError, match="exceed the share 0.8 of the GPU's free memory"):
        monkeypatch.setattr("torch.cuda.mem_get_info", lambda: (sizes.draft.weight_bytes, 0))
        gpu_share(None, sizes)


def test_methods_of_lmdeploy_itself(monkeypatch, other):
    options = {"model": str(other), "num_speculative_tokens": 3}
    config = SageConfig(device="cpu", speculative="EAGLE-3", speculative_options=options)
    with pytest.raises(SpeculationError, match="eagle3 needs LMDeploy's CUDA kernels, .* use draft .* instead"):
        check_settings_plugins(config)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    config = config.model_copy(update={"device": "cuda"})
    monkeypatch.setattr(methods, "find_spec", lambda name: None)
    with pytest.raises(SpeculationError, match="eagle3 needs FlashAttention-3 on cuda, .* flash_attn_interface"):
        check_settings_plugins(config)
    monkeypatch.setattr(methods, "find_spec", lambda name: name)
    check_settings_plugins(config)
    made = speculative_config(config)
    assert (made.method, made.model, made.num_speculative_tokens) == ("eagle3", str(other), 3)
    assert hook_config(config).speculative is None, "the engine guesses by itself"
    assert speculative_config(SageConfig(speculative="draft")) is None
    mtp = SageConfig(device="cuda", speculative="deepseek_mtp")
    check_settings_plugins(mtp)
    assert (speculative_config(mtp).method, speculative_config(mtp).model) == ("deepseek_mtp", "")
    for bad, message in (
        ({}, "eagle3 with model None; give the folder"),
        (options | {"num_speculative_tokens": 0}, "num_speculative_tokens is 0"),
        (options | {"lookahead": 3}, "eagle3 has no option lookahead; it takes model and num_speculative_tokens"),
    ):
        with pytest.raises(SpeculationError, match=message):
            check_settings_plugins(config.model_copy(update={"speculative_options": bad}))
    assert {"draft", "eagle", "eagle3", "deepseek_mtp"} <= set(speculator_names())
    with pytest.raises(SpeculationError, match="eagle is a method of LMDeploy's engine, not a strategy"):
        find_speculator("eagle")
    with pytest.raises(SpeculationError, match="known are: .*draft.*eagle, eagle3, deepseek_mtp"):
        find_speculator("medusa")
