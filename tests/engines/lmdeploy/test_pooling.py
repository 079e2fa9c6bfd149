"""Embeddings of the engine in this process, next to transformers' hidden states."""

import numpy as np
import pytest
import torch
from transformers import AutoModel

from sagellm.core.errors import EngineError
from sagellm.engines.lmdeploy.pooling import Pool


@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_engine_embeds_as_transformers_does(start_engine, model_folder, tp):
    engine = start_engine(tensor_parallel=tp) if tp > 1 else start_engine(kv={"policy": "lru"})
    model = AutoModel.from_pretrained(model_folder("llama"), dtype=torch.float32)
    prompts = [list(range(30, 130)), [7], [3 + number % 300 for number in range(900)]]
    for pooling in ("mean", "last"):
        with torch.no_grad():
            hidden = [model(torch.tensor([prompt])).last_hidden_state[0].numpy() for prompt in prompts]
        wanted = np.stack([rows.mean(0) if pooling == "mean" else rows[-1] for rows in hidden])
        for _ in range(2):  # cached the second time
            assert np.allclose(engine.embed(prompts, pooling, normalize=False), wanted, atol=1e-4)
        found = engine.embed(prompts, pooling)
        assert found.dtype == np.float32 and np.allclose(np.linalg.norm(found, axis=1), 1)
    answers = engine.generate(prompts)
    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in engine.generate(prompts)]


def test_what_cannot_be_embedded_is_refused(start_engine):
    engine = start_engine()
    for prompt in ([], [5] * 50_000):
        with pytest.raises(EngineError, match=r"prompts\[1\] has .* allowed are 1 to"):
            engine.embed([[1], prompt])
    with pytest.raises(EngineError, match="'max'; allowed are mean, last"):
        engine.embed([[1]], "max")


def test_a_mean_in_bfloat16_is_added_up_in_float32():
    pool = Pool("mean")
    pool.add(torch.full((4096, 1), 1.0, dtype=torch.bfloat16))
    pool.add(torch.full((1, 1), 2.0, dtype=torch.bfloat16))
    assert pool.vector()[0] == pytest.approx(4098 / 4097, abs=1e-6)
    with pytest.raises(EngineError, match="no hidden states"):
        Pool("last").vector()
