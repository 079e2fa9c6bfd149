"""Tests of a KV region over the memory of LMDeploy's own cache engine."""

import pytest
import torch

from sagellm.core.errors import TransferError
from sagellm.engines.lmdeploy.pd.region import region_of
from tests.engines.lmdeploy.pd.caches import BLOCK_SIZE, HEAD_DIM, LAYERS, cache_engine


def parts(region):
    return [(part.name, part.num_heads, part.width, part.dtype) for part in region.layout.parts]


def test_keys_and_values_are_the_cache_engines_own_memory():
    engine = cache_engine(5)
    region = region_of(engine)
    layout = region.layout
    assert (layout.num_layers, layout.num_blocks, layout.block_size) == (LAYERS, 5, BLOCK_SIZE)
    assert (layout.total_heads, layout.first_head, layout.tp_rank, layout.tp_size) == (2, 0, 0, 1)
    assert parts(region) == [("keys", 2, HEAD_DIM, "float32"), ("values", 2, HEAD_DIM, "float32")]
    assert [tensor.data_ptr() for tensor in region.tensors] == [tensor.data_ptr() for tensor in engine.full_gpu_cache]
    # The layer that attention writes to is the layer of the region.
    engine.gpu_cache[1][0][3].fill_(7)
    assert (region.tensors[0][1, 3] == 7).all()
    # Per token: 3 layers, keys and values, 2 heads of 8 floats.
    assert layout.token_bytes() == LAYERS * 2 * 2 * HEAD_DIM * 4
    assert layout.token_bytes() * BLOCK_SIZE == engine.get_cache_block_size(BLOCK_SIZE, engine.model_config)


@pytest.mark.parametrize(
    ("heads", "copies", "ranks", "first"),
    [(4, 1, 2, [0, 2]), (4, 1, 4, [0, 1, 2, 3]), (4, 2, 4, [0, 0, 1, 1]), (4, 4, 4, [0, 0, 0, 0])],
)
def test_heads_of_each_rank(heads, copies, ranks, first):
    """`heads`: as LMDeploy counts them, one for each rank where heads are held more than once."""
    layouts = [
        region_of(cache_engine(2, rank=rank, ranks=ranks, num_heads=heads, copies=copies)).layout for rank in range(ranks)
    ]
    assert [layout.first_head for layout in layouts] == first
    assert [layout.tp_rank for layout in layouts] == list(range(ranks))
    assert {layout.total_heads for layout in layouts} == {heads // copies}
    assert {layout.parts[0].num_heads for layout in layouts} == {heads // ranks}


@pytest.mark.parametrize(("policy", "width"), [(8, HEAD_DIM), (4, HEAD_DIM // 2)])
def test_quantized_blocks_bring_their_scales(policy, width):
    region = region_of(cache_engine(3, quant_policy=policy))
    assert parts(region) == [
        ("keys", 2, width, "uint8"),
        ("values", 2, width, "uint8"),
        ("key_scales", 2, 2, "float32"),
        ("value_scales", 2, 2, "float32"),
    ]
    assert [part.group for part in region.layout.parts] == [16, 1, 1, 1], "keys of the CPU device lie in groups"


def test_latent_attention_has_no_values():
    region = region_of(cache_engine(3, num_heads=1, head_dim=24, k_head_dim=24, v_head_dim=0))
    assert parts(region) == [("keys", 1, 24, "float32")]


def test_another_order_of_axes_is_refused():
    engine = cache_engine(3)
    engine.full_gpu_cache = tuple(torch.empty(LAYERS, 3, 2, BLOCK_SIZE, HEAD_DIM) for _ in range(2))  # heads first
    with pytest.raises(TransferError, match=r"keys are \(3, 3, 2, 4, 8\); .* \(3, 3, 4, 2\)"):
        region_of(engine)
