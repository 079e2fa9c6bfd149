"""Which type products are computed in: what a processor has, what is measured once, what is refused."""

import json

import pytest
import torch

from sagellm import _core
from sagellm.core.config import SageConfig
from sagellm.core.errors import ConfigError
from sagellm.engines.base import SamplingParams
from sagellm.engines.lmdeploy.cpu import compute
from sagellm.engines.lmdeploy.cpu.compute import CACHE_NAME, INSTRUCTION_SETS, choose_isa
from tests.engines.lmdeploy.cpu.plain_step import ISAS

HAS_BF16 = "avx512_bf16" in ISAS


def inputs_of(isa):
    return _core.CpuKernels("bfloat16", isa).inputs


def test_float32_is_there_on_every_processor(tmp_path):
    isa = choose_isa("float32", torch.bfloat16, tmp_path)
    assert inputs_of(isa) == "float32" and isa == next(each for each in INSTRUCTION_SETS if each in ISAS[:3])
    assert not any(tmp_path.iterdir()), "what is asked for is not measured"


def test_what_is_not_there_is_refused(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=r"compute bfloat16: weights of float32 keep its precision\. Use float32 or auto\."):
        choose_isa("bfloat16", torch.float32, tmp_path)
    monkeypatch.setattr(compute, "INSTRUCTION_SETS", ("avx2", "plain"))
    with pytest.raises(ConfigError, match=r"compute bfloat16: this processor has no instruction for it\. Use float32"):
        choose_isa("bfloat16", torch.bfloat16, tmp_path)
    assert choose_isa("auto", torch.bfloat16, tmp_path) in ("avx2", "plain")


def test_8_bits_are_for_who_asks(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=r"compute int8: weights of float32 keep its precision\. Use float32 or auto\."):
        choose_isa("int8", torch.float32, tmp_path)
    if _core.CpuKernels("bfloat16").has_8_bits:
        assert choose_isa("int8", torch.bfloat16, tmp_path) == ISAS[-1]
    monkeypatch.setattr(compute, "INSTRUCTION_SETS", ("plain",))
    with pytest.raises(ConfigError, match=r"compute int8: this processor has no instruction for it\. Use float32 or auto\."):
        choose_isa("int8", torch.bfloat16, tmp_path)


@pytest.mark.skipif(not HAS_BF16, reason="this processor has one type of products")
def test_the_quicker_one_is_measured_once(tmp_path, monkeypatch):
    measured = []

    def seconds(name, dtype, isa):
        measured.append(isa)
        return {"avx512_bf16": 2.0, "amx": 0.5}.get(isa, 1.0)

    monkeypatch.setattr(compute, "_seconds", seconds)
    monkeypatch.setattr(compute, "INSTRUCTION_SETS", compute.INSTRUCTION_SETS[compute.INSTRUCTION_SETS.index("avx512_bf16") :])
    isa = choose_isa("auto", torch.bfloat16, tmp_path)
    assert isa == "avx512" and sorted(measured) == ["avx512", "avx512_bf16"]
    assert choose_isa("auto", torch.bfloat16, tmp_path) == isa and len(measured) == 2
    assert list(json.loads((tmp_path / CACHE_NAME).read_text()).values()) == ["avx512"]
    for damaged in ("[1", "[]", json.dumps({key: "mmx" for key in json.loads((tmp_path / CACHE_NAME).read_text())})):
        (tmp_path / CACHE_NAME).write_text(damaged)
        measured.clear()
        assert choose_isa("auto", torch.bfloat16, tmp_path) == isa and len(measured) == 2
    if "amx" in ISAS:  # a version before this one did not know it
        monkeypatch.undo()
        monkeypatch.setattr(compute, "_seconds", seconds)
        assert choose_isa("auto", torch.bfloat16, tmp_path) == "amx"
        assert len(json.loads((tmp_path / CACHE_NAME).read_text())) == 2
        return
    (tmp_path / "file").write_text("")
    assert choose_isa("auto", torch.bfloat16, tmp_path / "file") == isa, "a cache that cannot be written costs a measurement"


def test_a_measurement_takes_a_moment_and_is_a_number(tmp_path):
    for isa in ISAS:
        assert 0 < compute._seconds("bfloat16", torch.bfloat16, isa) < 60


def test_an_engine_multiplies_in_the_type(start_engine, model_folder):
    for wanted in ("float32", "auto"):
        engine = start_engine(model=model_folder("llama-bf16"), dtype="bfloat16", compute=wanted)
        inputs = engine.engine.executor.model_agent.patched_model.model.lm_head.impl.packed.kernels.inputs
        assert inputs == ("bfloat16" if wanted == "auto" and HAS_BF16 else "float32")
    with pytest.raises(ConfigError, match="compute bfloat16: weights of float32 keep its precision"):
        start_engine(model=model_folder("llama"), dtype="float32", compute="bfloat16")
    with pytest.raises(ValueError, match="compute"):
        SageConfig(compute="int4")


@pytest.mark.skipif(not _core.CpuKernels("bfloat16").has_8_bits, reason="this processor has no products of 8 bits")
def test_an_engine_multiplies_in_8_bits(start_engine, model_folder):
    texts = [[5, 9, 2, 7] * 6, [8, 1, 4] * 5]
    folder = model_folder("llama-bf16")
    engines = {name: start_engine(model=folder, dtype="bfloat16", compute=name) for name in ("auto", "int8")}
    packed = engines["int8"].engine.executor.model_agent.patched_model.model.lm_head.impl.packed
    assert "in_8_bits" in packed.matrix and packed.data.nbytes < 0.6 * packed.outputs * packed.inputs * 2
    exact, near = (torch.from_numpy(engine.prompt_logits(texts[0])).float() for engine in engines.values())
    assert 0 < (exact - near).abs().mean() < 0.05 * exact.std(), "8 bits change something, and little"
    assert [len(answer.token_ids) for answer in engines["int8"].generate(texts, SamplingParams(6, ignore_eos=True))] == [6, 6]
