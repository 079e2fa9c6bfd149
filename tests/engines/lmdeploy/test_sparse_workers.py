"""Sparse policies of tensor-parallel workers: answers, records and counts are those of one process."""

import json
from dataclasses import replace

import numpy as np
import pytest

from sagellm.accel.sparsity.base import SparsePolicy, TopBlocks
from sagellm.accel.sparsity.registry import make_sparsity
from sagellm.core.errors import ConfigError, SparsityError
from sagellm.demo_model.random_model import write_random_model
from sagellm.engines.lmdeploy.sparsity import Observation, SparseSteps
from sagellm.replay.reads import replay_reads
from tests.engines.lmdeploy.test_block_drops import FEW, PROMPTS, KeepsRecent, Raises, answers, is_whole
from tests.engines.lmdeploy.test_block_drops import own as of_drops
from tests.engines.lmdeploy.test_sparsity import SPARSE, AsNative
from tests.engines.lmdeploy.test_sparsity import own as of_steps
from tests.sweeps import slow_but

SMALL = {"dtype": "float32", "kv_blocks": 128, "block_size": 16}
HALF = FEW | {"share": 0.6}  # more to choose among than with few: what a worker alone would keep differs
EACH_LAYER = SPARSE | {"whole_layers": 0}  # the tiny models have two layers, so all of them choose
TOGETHER = EACH_LAYER | {"by_head": False}


def own(kind: type) -> str:
    return f"{__name__}:{kind.__name__}"


class FromQueries(TopBlocks):
    """Blocks from a place on that the signs of the queries decide."""

    name = "from-queries"

    def select_blocks(self, view):
        found = []
        for queries, blocks, keep in zip(view.queries, view.num_blocks.tolist(), view.keep.tolist(), strict=True):
            groups = queries.reshape(-1, 32) if self.per == "head" else queries.reshape(1, 64)  # 2 or all 4 heads of 16 numbers
            starts = [int((group > 0).sum()) % (blocks - keep + 1) for group in groups]
            rows = np.array([[*range(start, start + keep - 1), blocks - 1] for start in starts])
            found.append(rows if self.per == "head" else rows[0])
        return found


class FromMeans(TopBlocks):
    """Blocks whose mean keys fit the queries best."""

    name = "from-means"
    summaries = ("means",)

    def select_blocks(self, view):
        weights = np.zeros((len(view.lengths), view.queries.shape[1] // 2, view.tables.shape[1]), np.float32)
        for row, blocks in enumerate(view.num_blocks.tolist()):
            queries = view.queries[row].reshape(weights.shape[1], 2, 16).sum(1)
            weights[row, :, :blocks] = np.einsum("hd,bhd->hb", queries, view.mean_keys(row))
        return replace(view, weights=weights).top()


class RaisesInOneWorker(TopBlocks):
    """Fails in the worker that has the last key head, which alone it sees."""

    name = "raises-in-one-worker"
    weights = "exact"

    def select_blocks(self, view):
        from lmdeploy.pytorch.distributed import get_dist_manager

        if view.step == 3 and get_dist_manager().current_context().rank == 1:
            raise RuntimeError("no more")
        return view.top()


class ForLayers(SparsePolicy):
    """Looks at summaries for all key heads together."""

    name = "for-layers"
    per, summaries = "layer", ("means",)

    def select_blocks(self, view):
        return view.top()


@pytest.fixture
def outcome(start_engine, tmp_path):
    """`outcome(workers, policy, options, **config)`: answers, lines of the record, and counts of a policy's engine."""

    def run(workers, policy, options, **config):
        file = tmp_path / f"{workers}.jsonl"
        file.unlink(missing_ok=True)
        settings = SMALL | {"model": "llama"} | config | {"sparsity": policy, "sparsity_options": options, "record": file}
        engine = start_engine(**settings, tensor_parallel=workers)
        found = answers(engine)
        assert is_whole(engine)
        engine.close()
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        drops = [{name: line[name] for name in ("request", "positions", "kept")} for line in lines if line["event"] == "drop"]
        reads = [{name: line[name] for name in ("phase", "lengths", "read")} for line in lines if line["event"] == "read"]
        return found, drops, reads, engine.hooks.report()["sparsity"]

    return run


@pytest.mark.parametrize(
    ("policy", "options", "config"),
    slow_but(
        [
            ("h2o", HALF, {}), ("snapkv", HALF, {}), ("h2o", HALF, {"decode_round": 4}), (of_drops(KeepsRecent), {}, {}),
            ("snapkv", HALF, {"max_prefill_tokens": 64, "prefix_caching": False}), ("snapkv", HALF, {"comm_backend": "group"}),
            ("streaming", SPARSE, {}), ("a_shape", FEW, {}), ("quest", TOGETHER, {}), ("quest", EACH_LAYER, {}),
            ("sketch", EACH_LAYER, {}), ("sketch", TOGETHER, {"comm_backend": "group"}), ("oracle", TOGETHER, {}),
            ("oracle", TOGETHER, {"decode_round": 4, "kv_schema": "int8"}), (of_steps(AsNative), TOGETHER, {}),
            (of_steps(AsNative), EACH_LAYER, {}), (own(FromMeans), EACH_LAYER, {}), (own(FromQueries), TOGETHER, {}),
            (own(FromQueries), EACH_LAYER, {}), ("snapkv", HALF, {"host_kv_blocks": 32}), ("random", SPARSE, {}),
            ("quest", TOGETHER, {"dtype": "bfloat16"}), ("xattention", FEW | {"stride": 4}, {}),
        ],
        ("h2o", HALF, {}), ("quest", TOGETHER, {}),
    ),
)  # fmt: skip
def test_two_workers_choose_and_give_up_what_one_does(outcome, policy, options, config):
    one, two = (outcome(workers, policy, options, **config) for workers in (1, 2))
    assert two == one
    _, drops, reads, report = two
    assert report["fault"] == "" and (drops or reads)
    assert (report["dropped"] or 0) == sum(len(line["positions"]) for line in drops)
    assert (report["dropped"] or report["held"] - report["read"] or report["prompt_held"] - report["prompt_read"]) > 8


@pytest.mark.slow
@pytest.mark.parametrize(
    ("heads", "workers", "policy", "options"),
    [
        ((4, 2), 4, "h2o", HALF), ((4, 2), 4, "quest", EACH_LAYER), ((4, 2), 4, "quest", TOGETHER),
        ((4, 2), 4, of_steps(AsNative), EACH_LAYER), ((6, 3), 3, "h2o", HALF), ((6, 3), 3, "sketch", TOGETHER),
    ],
    ids=str,
)  # fmt: skip
def test_workers_that_share_a_key_head_and_three_of_them(outcome, tmp_path, heads, workers, policy, options):
    """With four workers each of two key heads is that of two workers, which have a query head each."""
    shape = {"num_layers": 2, "num_heads": heads[0], "num_kv_heads": heads[1], "intermediate_size": 192, "vocab_size": 320}
    folder = tmp_path / "model"
    write_random_model(folder, hidden_size=16 * heads[0], **shape)
    one, several = (outcome(number, policy, options, model=folder) for number in (1, workers))
    assert several == one


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "options"), [("streaming", SPARSE), ("quest", TOGETHER), ("snapkv", HALF)])
def test_the_replay_makes_the_choices_of_workers_again(start_engine, tmp_path, policy, options):
    file = tmp_path / "events.jsonl"
    engine = start_engine(**SMALL, record=file, sparsity=policy, sparsity_options=options, tensor_parallel=2)
    for _ in range(3):
        answers(engine)
        answers(engine, PROMPTS[::3])
    engine.close()
    report = replay_reads(file)
    assert report.agrees and report.rows[0].decode_read < report.rows[0].decode_held
    assert report.num_choices > 100 or policy != "streaming"


def test_a_policy_that_fails_in_one_worker_is_switched_off_in_all(start_engine, reference):
    """A worker alone that repeats a step would wait for the others without an end."""
    engine = start_engine(
        **SMALL, sparsity=own(RaisesInOneWorker), sparsity_options=EACH_LAYER, tensor_parallel=2, comm_backend="shm"
    )
    found = answers(engine)
    report = engine.hooks.report()["sparsity"]
    assert "in another worker" in report["fault"] and report["steps"] == 4 and len(found[0]) == 24
    assert answers(engine) == reference(PROMPTS, 24)


@pytest.mark.slow
def test_a_policy_that_fails_to_give_up_blocks_keeps_them(start_engine, reference):
    engine = start_engine(**SMALL, sparsity=of_drops(Raises), tensor_parallel=2)
    assert answers(engine) == reference(PROMPTS, 24)
    assert "RuntimeError: no more" in engine.hooks.report()["sparsity"]["fault"]


@pytest.mark.slow
def test_prompts_of_workers_with_guesses_are_counted(start_engine):
    found = []
    for workers in (1, 2):
        engine = start_engine(**SMALL, sparsity="a_shape", sparsity_options=FEW, speculative="ngram", tensor_parallel=workers)
        found.append((answers(engine), engine.hooks.report()["sparsity"]))
        engine.close()
    assert found[0] == found[1] and found[1][1]["prompt_read"] > 0


def test_workers_that_tell_nothing_keep_nothing():
    for is_first in (True, False):
        steps = SparseSteps(make_sparsity("h2o"), 16)
        steps.serve_engine(is_first=is_first, is_recorded=True)
        one = np.ones(1, np.int64)
        for _ in range(3):
            steps.note(Observation(one, one, one[None], one, 1))
        assert [len(steps.take_news().observations) for _ in range(2)] == [3 * is_first, 0]
        assert (steps.readings is not None) == is_first


def test_what_workers_cannot_choose_is_refused_before_they_start(start_engine, monkeypatch):
    with pytest.raises(ConfigError, match="a worker has the summaries of its own key heads, .* use per 'head', or weights"):
        start_engine(**SMALL, sparsity=own(ForLayers), tensor_parallel=2)
    monkeypatch.setattr("sagellm.engines.lmdeploy.cpu.compiled.why_eager", lambda model: "it is asked to")
    with pytest.raises(SparsityError, match="snapkv observes queries, which only the CPU device's native step can do"):
        start_engine(**SMALL, sparsity="snapkv", tensor_parallel=2)
