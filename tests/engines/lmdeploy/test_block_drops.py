"""Policies that give up blocks of running requests, and those that choose blocks of prompts, in the real engine."""

import asyncio
import json

import numpy as np
import pytest
from click.testing import CliRunner

from sagellm.accel.sparsity.base import SparsePolicy
from sagellm.cli.main import main
from sagellm.core.errors import ConfigError, TraceError
from sagellm.engines.base import SamplingParams
from sagellm.replay.reads import replay_reads
from tests.engines.lmdeploy.test_exactness import cancelled
from tests.reference import make_prompts

PROMPTS = make_prompts((150, 20, 97, 210))
PARAMS = SamplingParams(max_new_tokens=24, ignore_eos=True)
FEW = {"share": 0.3, "min_blocks": 3, "last": 1}
SPARSE = {"snapkv": FEW, "h2o": FEW, "a_shape": FEW, "xattention": {"share": 0.3, "min_blocks": 3, "stride": 4}}
SMALL = {"dtype": "float32", "kv_blocks": 128, "block_size": 16}


def answers(engine, prompts=PROMPTS, params=PARAMS):
    return [one.token_ids for one in engine.generate(prompts, params)]


def own(kind: type) -> str:
    return f"{__name__}:{kind.__name__}"


def is_whole(engine) -> bool:
    """Whether no block is held by anyone but the prefix cache."""
    counts = engine.hooks.report()["blocks"]
    return counts["free"] + counts["cached"] == counts["total"] and counts["active"] == 0


class Recent(SparsePolicy):
    """Reads the first block and the two latest ones."""

    name = "recent"

    def budget(self, num_blocks):
        return min(num_blocks, 3)

    def select_blocks(self, view):
        return [np.r_[:1, blocks - keep + 1 : blocks] for blocks, keep in zip(view.num_blocks, view.keep, strict=True)]


class KeepsRecent(SparsePolicy):
    """Gives up all blocks but those that `Recent` reads."""

    name = "keeps-recent"
    drops_after = "step"
    budget = Recent.budget

    def drop_blocks(self, view):
        return [np.arange(1, len(blocks) - 2) for blocks in view.positions]


class Raises(KeepsRecent):
    def drop_blocks(self, view):
        raise RuntimeError("no more")


class GivesUpTheLast(KeepsRecent):
    def drop_blocks(self, view):
        return [np.array([len(blocks) - 1]) for blocks in view.positions]


class RaisesInPrompts(SparsePolicy):
    name = "raises-in-prompts"

    def select_prompt_blocks(self, view):
        raise RuntimeError("no more")


@pytest.mark.parametrize("name", SPARSE)
def test_a_policy_that_keeps_everything_changes_nothing_and_one_that_does_not_does(start_engine, reference, name):
    engine = start_engine(**SMALL, sparsity=name, sparsity_options=SPARSE[name] | {"share": 1.0})
    assert answers(engine) == reference(PROMPTS, 24)
    engine.close()
    engine = start_engine(**SMALL, sparsity=name, sparsity_options=SPARSE[name])
    found = answers(engine)
    assert found != reference(PROMPTS, 24) and found[1] == reference(PROMPTS, 24)[1]  # the short one is read whole
    report = engine.hooks.report()["sparsity"]
    assert report["fault"] == "" and is_whole(engine)
    if name in ("snapkv", "h2o"):
        evicted = engine.hooks.report()["evicted"]["sparse"]
        assert report["dropped"] == evicted > 15
    else:
        assert 0.2 < report["prompt_read"] / report["prompt_held"] < 0.75 and report["dropped"] is None


def test_blocks_that_are_given_up_are_as_those_that_are_not_read(start_engine):
    """The prompts end in the middle of a block, and no answer goes beyond it: both have the same blocks in every step."""
    prompts = make_prompts((33, 130, 97, 210))
    found = []
    for kind in (Recent, KeepsRecent):
        engine = start_engine(**SMALL, sparsity=own(kind))
        found.append(answers(engine, prompts, SamplingParams(max_new_tokens=13, ignore_eos=True)))
        assert is_whole(engine)
        engine.close()
    assert found[0] == found[1]


@pytest.mark.parametrize("name", ["snapkv", "h2o"])
@pytest.mark.parametrize(
    "config",
    [{}, {"decode_round": 4}, {"host_kv_blocks": 32}, {"prefix_caching": False, "max_prefill_tokens": 64}],
)
def test_a_sequence_gets_the_same_answer_alone_and_beside_others(start_engine, name, config):
    engine = start_engine(**SMALL | config, sparsity=name, sparsity_options=SPARSE[name])
    alone = [answers(engine, [prompt])[0] for prompt in PROMPTS]
    assert answers(engine) == alone and is_whole(engine)
    engine.close()
    if "max_prefill_tokens" not in config and (name, config) != ("h2o", {"decode_round": 4}):  # it is asked once a round
        engine = start_engine(**SMALL, sparsity=name, sparsity_options=SPARSE[name])
        assert answers(engine) == alone


def test_what_is_not_whole_is_not_published(start_engine):
    """If a prompt gave up blocks, only its blocks before the first gap are found again."""
    engine = start_engine(**SMALL, prefix_caching=True, sparsity=own(KeepsRecent))
    first = answers(engine, [PROMPTS[3]])
    hits = engine.hooks.report()["prefix"]["hit_tokens"]
    assert hits == 0 and engine.hooks.report()["blocks"]["cached"] == 1
    assert answers(engine, [PROMPTS[3]]) == first
    assert engine.hooks.report()["prefix"]["hit_tokens"] == 16
    whole = make_prompts((40,))[0]  # is within the budget, and published as ever
    assert answers(engine, [whole]) == answers(engine, [whole])
    assert engine.hooks.report()["prefix"]["hit_tokens"] == 16 + 32


def test_more_long_requests_run_at_once(start_engine, tmp_path):
    """Four dense requests fill the pool. With a quarter of the blocks kept, twice as many decode at once, and none is lost."""
    prompts = make_prompts([256] * 24)
    params = SamplingParams(max_new_tokens=40, ignore_eos=True)
    most = {}
    for name in (None, "snapkv"):
        given = {} if name is None else {"sparsity": name, "sparsity_options": {"share": 0.25, "min_blocks": 3, "last": 1}}
        file = tmp_path / f"{name}.jsonl"
        engine = start_engine(dtype="float32", kv_blocks=80, block_size=16, max_batch_size=32, record=file, **given)
        assert all(len(one) == 40 for one in answers(engine, prompts, params)) and is_whole(engine)
        engine.close()
        steps = [line for line in map(json.loads, file.read_text().splitlines()) if line["event"] == "step"]
        most[name] = max(step["requests"] for step in steps if step["phase"] == "decode")
    assert most[None] <= 5 and most["snapkv"] >= 9


def test_a_small_pool_sends_requests_back_and_loses_none(start_engine, reference):
    """Requests that lose their blocks compute their prompts again, and give up blocks again."""
    prompts = make_prompts([150, 160, 170, 180])
    engine = start_engine(dtype="float32", kv_blocks=16, block_size=16, sparsity=own(KeepsRecent))
    alone = [answers(engine, [prompt])[0] for prompt in prompts]
    assert answers(engine, prompts) == alone and is_whole(engine)
    assert engine.hooks.report()["sparsity"]["fault"] == ""


def test_guesses_change_no_answer_behind_sparse_prompts(start_engine):
    found = []
    for given in ({}, {"speculative": "ngram"}):
        engine = start_engine(**SMALL, sparsity="a_shape", sparsity_options=FEW, **given)
        found.append(answers(engine))
        assert engine.hooks.report()["sparsity"]["prompt_read"] > 0
        engine.close()
    assert found[0] == found[1]


def test_cancelled_requests_leave_no_block_behind(start_engine):
    engine = start_engine(**SMALL, prefix_caching=True, sparsity="h2o", sparsity_options=SPARSE["h2o"])

    async def several():
        await asyncio.gather(*[cancelled(engine, PROMPTS[3], after_tokens=tokens) for tokens in (1, 5, 17)])

    engine._on_loop(several())
    answers(engine)
    assert is_whole(engine)


@pytest.mark.parametrize(
    ("kind", "fault"),
    [(Raises, "RuntimeError: no more"), (GivesUpTheLast, "it chose blocks"), (RaisesInPrompts, "RuntimeError: no more")],
)
def test_a_policy_that_fails_is_switched_off_and_steps_read_everything(start_engine, reference, kind, fault):
    engine = start_engine(**SMALL, sparsity=own(kind))
    assert answers(engine) == reference(PROMPTS, 24)
    assert fault in engine.hooks.report()["sparsity"]["fault"]


@pytest.mark.parametrize(
    ("name", "config", "fault"),
    [("h2o", {"speculative": "ngram"}, "guess"),
     ("snapkv", {"engine": "turbomind", "device": "cuda"}, "not open")],
)  # fmt: skip
def test_settings_that_are_refused(start_engine, name, config, fault):
    with pytest.raises(ConfigError, match=fault):
        start_engine(**{"dtype": "float32"} | config, sparsity=name)


@pytest.fixture
def recorded(start_engine, tmp_path):
    def record(name: str, options: dict, **config):
        file = tmp_path / "events.jsonl"
        engine = start_engine(**SMALL | config, record=file, sparsity=name, sparsity_options=options)
        for _ in range(3):
            answers(engine)
            answers(engine, PROMPTS[::3])
        engine.close()
        return file

    return record


@pytest.mark.parametrize("name", ["streaming", "random", "a_shape", "quest", "snapkv", "xattention"])
def test_a_record_says_what_was_read_and_the_replay_chooses_the_same(recorded, name):
    file = recorded(name, SPARSE.get(name, FEW))
    report = replay_reads(file)
    assert report.agrees and report.policy == name
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    reads = [line for line in lines if line["event"] == "read"]
    if name in ("streaming", "random"):
        assert report.num_choices == sum("chosen" in line for line in reads) > 100 and reads[0]["chosen"][0].startswith("0")
    if name == "quest":
        assert report.num_budgets > 100 and report.num_choices == 0
    (row,) = report.rows

    def sums(phase):
        return [sum(sum(line[what]) for line in reads if line["phase"] == phase) for what in ("read", "held")]

    if name in ("streaming", "random", "quest"):
        assert [row.decode_read, row.decode_held] == sums("decode") and row.saved_bytes > 0 and row.seconds <= row.dense_seconds
    if name == "a_shape":
        assert [row.prompt_read, row.prompt_held] == sums("prefill") and row.decode_read == row.decode_held
    if name == "xattention":
        assert sums("prefill")[0] <= row.prompt_read < row.prompt_held
    if name == "snapkv":
        drops = [line for line in lines if line["event"] == "drop"]
        assert drops and all(line["policy"] == "snapkv" and line["kept"] >= 3 for line in drops)
        assert row.decode_read < row.decode_held


def test_a_dense_record_says_what_policies_would_have_saved(start_engine, tmp_path):
    file = tmp_path / "events.jsonl"
    engine = start_engine(**SMALL, record=file)
    for _ in range(3):
        answers(engine)
        answers(engine, PROMPTS[::3])
    engine.close()
    with pytest.raises(TraceError, match="without a sparse policy"):
        replay_reads(file)
    options = {"streaming": FEW, "h2o": FEW, "xattention": SPARSE["xattention"]}
    asked = ["replay", "--reads", str(file), "--sparsity", ",".join(options), "--sparsity-options", json.dumps(options)]
    found = CliRunner().invoke(main, [*asked, "--json"])
    rows = {row["policy"]: row for row in json.loads(found.output)["rows"]}
    assert found.exit_code == 0 and rows["streaming"]["decode_read"] == rows["h2o"]["decode_read"] < rows["h2o"]["decode_held"]
    assert rows["xattention"]["decode_read"] == rows["xattention"]["decode_held"] and rows["xattention"]["prompt_read"] > 0
    assert "saved" in CliRunner().invoke(main, asked).output


def test_a_changed_record_is_found(recorded):
    file = recorded("streaming", FEW)
    text = file.read_text()
    place = text.rindex('"chosen": ["0') + len('"chosen": ["')
    file.write_text(text[:place] + "1" + text[place + 1 :])
    report = replay_reads(file)
    assert not report.agrees and report.differences[0].field == "chosen"
    assert CliRunner().invoke(main, ["replay", "--reads", str(file)]).exit_code == 1
