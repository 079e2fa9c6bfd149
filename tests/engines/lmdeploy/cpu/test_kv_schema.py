"""Keys and values of other types than the model's, in the engine: sizes, answers, and everything that carries blocks."""

import json
import shutil

import pytest

from sagellm.core.config import KVConfig, SageConfig
from sagellm.core.errors import ConfigError
from sagellm.demo_model.random_model import write_random_model
from sagellm.engines.base import KVCacheSchema, SamplingParams
from sagellm.engines.lmdeploy.cpu import compiled
from sagellm.engines.lmdeploy.sizing import size_engine
from sagellm.replay.verify import verify_log
from tests.engines.lmdeploy.test_exactness import CROWD, answers
from tests.plugins import plugin_of
from tests.reference import make_prompts
from tests.sweeps import slow_but

SCHEMAS = ("float32", "bfloat16", "fp8", "int8", "int4")
FEW_BITS = ("fp8", "int8", "int4")
SHAPE = dict(
    num_layers=2, num_heads=4, num_kv_heads=2, head_dim=64, hidden_size=128, intermediate_size=192, vocab_size=512,
    max_position_embeddings=1024,
)  # fmt: skip
PROMPTS = make_prompts((5, 40, 100, 300))
GREEDY = SamplingParams(max_new_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def folder(request, tmp_path_factory):
    """A model whose heads are as wide as real ones."""
    place = tmp_path_factory.mktemp("model") / request.param
    write_random_model(place, architecture="llama", dtype=request.param, **SHAPE)
    return place


def tokens(engine, prompts=PROMPTS, params=GREEDY):
    return [one.token_ids for one in engine.generate(prompts, params)]


@pytest.mark.parametrize("schema", SCHEMAS)
def test_answers_do_not_depend_on_the_way(start_engine, folder, schema):
    """Alone and in a batch, from the cache and computed, with guesses and without; near those of the model's own type."""
    engine = start_engine(model=folder, kv_schema=schema)
    assert engine.info.kv_schema.dtype == schema
    expected = tokens(engine)
    assert expected == tokens(engine), "a cached prefix changes the answer"
    assert expected == [tokens(engine, [prompt])[0] for prompt in PROMPTS]
    guessing = start_engine(model=folder, kv_schema=schema, speculative="suffix")
    assert tokens(guessing) == expected == tokens(guessing)
    plain = start_engine(model=folder)
    for prompt in PROMPTS:
        found, exact = engine.prompt_logits(prompt), plain.prompt_logits(prompt)
        assert abs(found - exact).max() < {"int4": 0.5, "fp8": 0.3}.get(schema, 0.05) * abs(exact).max()


@pytest.mark.parametrize("schema", slow_but([*FEW_BITS, "bfloat16"], "fp8"))
def test_module_by_module_it_answers_as_natively(start_engine, model_folder, monkeypatch, schema):
    native = start_engine(kv_schema=schema)
    expected = tokens(native)
    monkeypatch.setattr(compiled, "why_eager", lambda model: "asked for")
    eager = start_engine(kv_schema=schema)
    assert eager.engine.executor.model_agent.patched_model.native is None
    assert tokens(eager) == expected == tokens(eager)


@pytest.mark.parametrize("schema", slow_but(FEW_BITS, "int8"))
def test_tiers_carry_them_and_the_record_replays(start_engine, tmp_path, schema):
    expected = answers(start_engine(kv_schema=schema, kv_blocks=200), CROWD)
    log = tmp_path / "log.jsonl"
    kv = KVConfig(migration="always", disk=tmp_path / "kv", disk_gib=0.01, deadline_s=30.0)
    engine = start_engine(kv_schema=schema, kv_blocks=30, host_kv_blocks=16, kv=kv, record=log)
    for _ in range(3):
        assert answers(engine, CROWD) == expected
    events = plugin_of(engine).report()["events"]
    assert events["saved"] > 0 and events["loaded"] > 0 and events["moved_gpu_cpu"] > 0
    schema_of_blocks = engine.info.kv_schema
    engine.close()
    assert verify_log(log).agrees
    assert schema_of_blocks.to_json() in json.loads(log.read_text().splitlines()[0])["layout"]
    # The folder of the tier keeps the schema, and gives its blocks to no other.
    assert KVCacheSchema.from_json((tmp_path / "kv" / "kv_schema.json").read_text()) == schema_of_blocks
    blocks = sorted(file.name for file in (tmp_path / "kv").glob("*.kv"))
    with pytest.raises(ConfigError, match=rf"holds blocks with keys and values in {schema}.*--kv-schema {schema}\."):
        start_engine(kv_blocks=30, host_kv_blocks=16, kv=kv)
    assert sorted(file.name for file in (tmp_path / "kv").glob("*.kv")) == blocks


def test_a_folder_without_blocks_takes_another_schema(start_engine, tmp_path):
    kv = KVConfig(disk=tmp_path / "kv", disk_gib=0.01)
    start_engine(kv_schema="int8", host_kv_blocks=16, kv=kv).close()
    start_engine(kv_schema="int4", host_kv_blocks=16, kv=kv).close()
    assert json.loads((tmp_path / "kv" / "kv_schema.json").read_text())["dtype"] == "int4"


@pytest.mark.parametrize("schema", ["int8", "int4"])
def test_two_ranks_answer_as_one(start_engine, schema):
    one = tokens(start_engine(kv_schema=schema, kv_blocks=128))
    assert tokens(start_engine(kv_schema=schema, kv_blocks=128, tensor_parallel=2)) == one


def test_a_draft_model_keeps_its_own_type(start_engine, model_folder):
    options = {"speculative": "draft", "speculative_options": {"model": str(model_folder("llama"))}}
    expected = tokens(start_engine(kv_schema="int8"))
    engine = start_engine(kv_schema="int8", **options)
    assert tokens(engine) == expected
    report = engine.hooks.report()["speculation"]
    assert report["accepted"] > 0.5 * report["drafted"] > 0


def test_more_blocks_in_the_same_memory(folder):
    def sizes(schema):
        return size_engine(SageConfig(model=folder, kv_schema=schema, kv_memory_share=0.01), folder, "cpu")

    base = sizes("bfloat16").num_blocks
    if "bfloat16" in str(folder):  # scales have the model's type
        assert sizes("int8").num_blocks >= 1.85 * base and sizes("fp8").num_blocks >= 1.85 * base
        assert sizes("int4").num_blocks >= 3.5 * base
    assert sizes("float32").num_blocks == pytest.approx(base / 2, abs=1)


def test_a_schema_goes_through_json():
    schema = KVCacheSchema(64, 30, 3, 64, "int8", None, "bfloat16", "key_groups")
    assert KVCacheSchema.from_json(schema.to_json()) == schema
    for text, words in (
        ("{", "this is no KV cache schema: Invalid JSON"),
        (json.dumps({"block_size": 64}), "num_layers: Field required"),
        (schema.to_json().replace('"int8"', '"int3"'), "dtype 'int3'; it may be float32"),
    ):
        with pytest.raises(ConfigError, match=words):
            KVCacheSchema.from_json(text)


@pytest.mark.parametrize(
    ("device", "change", "schema", "words"),
    [
        ("cuda", {}, "fp8", "kv_schema fp8 is not available on cuda: .* as int8 or int4"),
        ("cpu", {"head_dim": 20}, "int4", "kv_schema int4 needs heads of a multiple of 8 numbers; this model's have 20"),
        ("cpu", {"kv_lora_rank": 32, "qk_rope_head_dim": 16}, "int8", "latent attention keeps keys and values in one"),
    ],
)
def test_a_schema_that_cannot_be(folder, tmp_path, device, change, schema, words):
    shutil.copytree(folder, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text()) | change
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=words):
        size_engine(SageConfig(kv_schema=schema), tmp_path / "model", device)
