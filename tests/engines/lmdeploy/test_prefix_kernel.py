"""Attention that reads common keys once: in Triton's interpreter, beside plain formulas and LMDeploy's kernel."""

import itertools
import math
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sagellm.core.config import HookConfig
from sagellm.engines.lmdeploy import prefix_attention
from tests.engines.lmdeploy.interpreted import fresh, mend, needs_triton
from tests.sweeps import slow_but

pytestmark = needs_triton
KERNELS = "sagellm.engines.lmdeploy.kernels"
LMDEPLOYS = "lmdeploy.pytorch.kernels"


@pytest.fixture(scope="module")
def kernels():
    """The module with its kernels interpreted. Triton decides when it is imported, and other tests may have imported it."""
    with pytest.MonkeyPatch.context() as patch, fresh("triton", KERNELS, LMDEPLOYS):
        patch.setenv("TRITON_INTERPRET", "1")
        mend(import_module("triton.runtime.interpreter"))
        module = import_module(f"{KERNELS}.prefix_aware_attention")
        # Steps of tests are small, and must be split all the same.
        module.PROGRAMS, module.MIN_SPLIT, module.KEYS_PER_ROW = 24, 32, 1
        yield module


@pytest.fixture(scope="module")
def lmdeploys(kernels):
    """LMDeploy's `paged_attention_fwd` in the interpreter: a device for it to ask, and functions that it finds too early."""
    triton, tl = sys.modules["triton"], sys.modules["triton.language"]
    target = SimpleNamespace(backend="cpu", arch=0)
    triton.runtime.driver.set_active(SimpleNamespace(get_current_target=lambda: target))
    module = import_module(f"{LMDEPLOYS}.cuda.pagedattention")
    module._nv_cap = (9, 0)
    module.get_device_props = lambda device: {"multi_processor_count": 4, "warps_per_sm": 64}
    module.tl_exp2, module.tl_log2 = lambda x: tl.exp2(x), lambda x: tl.log2(x)
    module.tanh = lambda x: 2 * tl.sigmoid(2 * x) - 1
    return module.paged_attention_fwd


def plain_attention(query, k_cache, v_cache, tables, lengths, scale, softcap=None):
    """Attention in float64, one sequence after the other."""
    share, block_size = query.shape[1] // k_cache.shape[2], k_cache.shape[1]
    found = query.new_zeros(*query.shape[:2], v_cache.shape[3], dtype=torch.float64)
    for row, queries, table, length in zip(found, query.double(), tables.long(), lengths.tolist(), strict=True):
        if length:
            blocks = table[: math.ceil(length / block_size)]
            keys, values = (
                cache[blocks].flatten(0, 1)[:length].double().repeat_interleave(share, 1)
                for cache in (k_cache, v_cache)
            )
            scores = torch.einsum("hd,nhd->hn", queries, keys) * scale
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            row[:] = torch.einsum("hn,nhd->hd", scores.softmax(1), values)
    return found


def step(groups, alone=(), heads=6, kv_heads=2, size=16, v_size=None, block_size=16, dtype=torch.float32, seed=0):
    """Arguments of a step. A group is (blocks in common, lengths of members); sequences are shuffled."""
    rng = np.random.default_rng(seed)
    lengths = np.array([length for _, members in groups for length in members] + list(alone))
    width = -(-int(lengths.max()) // block_size) + 1
    tables = rng.permutation(len(lengths) * width).reshape(len(lengths), width).astype(np.int32)
    first = 0
    for common, members in groups:
        tables[first : first + len(members), :common] = tables[first, :common]
        first += len(members)
    order = rng.permutation(len(lengths))
    tables, lengths = torch.from_numpy(tables[order]), torch.from_numpy(lengths[order])
    torch.manual_seed(seed)
    query = torch.randn(len(lengths), heads, size, dtype=dtype)
    k_cache = torch.randn(tables.numel(), block_size, kv_heads, size, dtype=dtype)
    v_cache = torch.randn(tables.numel(), block_size, kv_heads, v_size or size, dtype=dtype)
    return query, k_cache, v_cache, tables, lengths


def groups_of(kernels, arguments, min_tokens=1):
    _, k_cache, _, tables, lengths = arguments
    return kernels.find_groups(tables.numpy(), lengths.numpy(), k_cache.shape[1], min_tokens)


def off(kernels, arguments, groups, softcap=None) -> float:
    """The largest difference from the plain formula."""
    found = kernels.prefix_aware_attention(*arguments, 0.3, groups, softcap)
    assert found.dtype == arguments[0].dtype and found.shape[:2] == arguments[0].shape[:2]
    return float((found - plain_attention(*arguments, 0.3, softcap)).abs().max())


SHAPES = {
    "9/3": dict(heads=9, kv_heads=3, size=64),
    "8/8": dict(heads=8, kv_heads=8, size=80),
    "14/2": dict(heads=14, kv_heads=2, size=64, v_size=40, block_size=64),
}


@pytest.mark.parametrize(
    ("shape", "softcap"),
    slow_but(itertools.product(SHAPES, (None, 5.0)), ("9/3", None), ("8/8", 5.0), ("14/2", None)),
)
def test_each_shape(kernels, shape, softcap):
    size = SHAPES[shape].get("block_size", 16)
    arguments = step([(2, [2 * size + 1, 4 * size])], [size + 3], **SHAPES[shape])
    groups = groups_of(kernels, arguments)
    assert groups.common.tolist() == [2] and sorted(groups.shared.tolist()) == [0, 2, 2]
    assert off(kernels, arguments, groups, softcap) < 1e-5


@pytest.mark.parametrize(("dtype", "most"), [(torch.bfloat16, 0.02), (torch.float16, 0.002)])
def test_sixteen_bits(kernels, dtype, most):
    arguments = step([(3, [50, 97, 64])], [33], size=64, dtype=dtype)
    assert off(kernels, arguments, groups_of(kernels, arguments)) < most


@settings(max_examples=5)
@given(st.data())
def test_random_steps(kernels, data):
    sizes = data.draw(st.lists(st.tuples(st.integers(1, 4), st.integers(2, 3)), min_size=1, max_size=2))
    groups = [
        (common, [16 * common + data.draw(st.integers(1, 40)) for _ in range(members)]) for common, members in sizes
    ]
    alone = data.draw(st.lists(st.integers(0, 80), max_size=1))
    arguments = step(groups, alone, seed=data.draw(st.integers(0, 99)))
    found = groups_of(kernels, arguments)
    assert len(found.common) >= 1
    assert off(kernels, arguments, found, data.draw(st.sampled_from([None, 2.0]))) < 1e-5


class Reads:
    """Counts how often each number of a cache is read."""

    def __init__(self, cache: torch.Tensor) -> None:
        self.cache, self.counts = cache, np.zeros(cache.numel(), np.int64)

    def __call__(self, pointers: np.ndarray) -> None:
        places = (pointers - np.uint64(self.cache.data_ptr())) // np.uint64(self.cache.element_size())
        np.add.at(self.counts, places[places < self.cache.numel()].astype(np.int64), 1)

    @property
    def blocks(self) -> list[set[int]]:
        """Counts of the numbers of each block."""
        return [set(each.tolist()) for each in self.counts.reshape(len(self.cache), -1)]


def count_reads(monkeypatch, *caches: torch.Tensor) -> list[Reads]:
    """Return a counter for each cache; the interpreter loads through them from now on."""
    counters = [Reads(cache) for cache in caches]
    builder = sys.modules["triton.runtime.interpreter"].InterpreterBuilder
    load = builder.create_masked_load

    def counted(self, pointers, mask, *rest):
        for counter in counters:
            counter(pointers.data[mask.data])
        return load(self, pointers, mask, *rest)

    monkeypatch.setattr(builder, "create_masked_load", counted)
    return counters


@pytest.mark.parametrize(("members", "tiles"), [(5, 1), (7, 2)])
def test_common_blocks_are_read_once_for_each_tile(kernels, monkeypatch, members, tiles):
    """In float32 a tile has 16 rows, and a member has 3 heads for each key head."""
    arguments = step([(3, [65] * members)], [32])
    _, k_cache, v_cache, tables, lengths = arguments
    counters = count_reads(monkeypatch, k_cache, v_cache)
    groups = groups_of(kernels, arguments)
    assert off(kernels, arguments, groups) < 1e-5
    for counter in counters:
        found = counter.blocks
        assert [found[block] for block in tables[groups.members[0], :3]] == [{tiles}] * 3
        for table, length in zip(tables.tolist(), lengths.tolist(), strict=True):
            if length == 65:
                assert (found[table[3]], found[table[4]], found[table[5]]) == ({1}, {0, 1}, {0})
            else:
                assert [found[block] for block in table[:3]] == [{1}, {1}, {0}]


def test_a_member_reads_the_blocks_of_its_group_and_not_its_own(kernels):
    arguments = step([(2, [40, 50, 60])], block_size=16)
    groups = groups_of(kernels, arguments)
    wanted = kernels.prefix_aware_attention(*arguments, 0.3, groups)
    *_, tables, _ = arguments
    for member in groups.members[1:].tolist():
        tables[member, :2] = 5
    assert torch.equal(kernels.prefix_aware_attention(*arguments, 0.3, groups), wanted)


def test_numbers_beyond_the_end_of_a_sequence_do_not_count(kernels):
    arguments = step([(1, [20, 25])], [7, 0])
    _, k_cache, v_cache, tables, lengths = arguments
    for table, length in zip(tables.tolist(), lengths.tolist(), strict=True):
        for cache in (k_cache, v_cache):
            cache[table[length // 16], length % 16 :] = math.nan
            cache[table[length // 16 + 1 :]] = math.nan
    assert off(kernels, arguments, groups_of(kernels, arguments)) < 1e-5


@pytest.mark.slow
def test_room_for_more_and_larger_groups(kernels, monkeypatch):
    """As a captured graph of steps needs it: its grid is that of the largest step. Programs to spare read nothing."""
    arguments = step([(2, [40, 50]), (1, [20, 30, 40])])
    found = groups_of(kernels, arguments)
    wider = kernels.Groups(
        found.members, torch.cat([found.starts, found.starts[-1:]]), torch.cat([found.common, found.common[:1]]),
        found.shared, most_members=12, most_common=3,
    )  # fmt: skip
    counters = count_reads(monkeypatch, *arguments[1:3])
    assert off(kernels, arguments, wider) < 1e-5
    assert [counter.counts.max() for counter in counters] == [1, 1]


@pytest.mark.slow
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_lmdeploys_kernel_gives_the_same(kernels, lmdeploys, softcap):
    arguments = step([(2, [40, 33])], [20], heads=9, kv_heads=3, size=64)
    query, *_ = arguments
    wanted = torch.empty_like(query)
    lmdeploys(*arguments[:3], wanted, *arguments[3:], sm_scale=0.3, logit_softcapping=softcap)
    found = kernels.prefix_aware_attention(*arguments, 0.3, groups_of(kernels, arguments), softcap)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)


def attention_of() -> SimpleNamespace:
    """Return the attributes of LMDeploy's `TritonAttentionImpl` that `attended` reads."""
    return SimpleNamespace(alibi=False, sliding_window=None, block_sparse_size=1, scale=0.3, logit_softcapping=0.0)


def engine_of(arguments, **settings) -> tuple[SimpleNamespace, SimpleNamespace]:
    """A cache engine and the inputs of a step."""
    _, k_cache, _, tables, lengths = arguments
    config = SimpleNamespace(block_size=k_cache.shape[1], max_batches=16, sage=HookConfig(**settings).model_dump_json())
    model = SimpleNamespace(num_key_value_heads=8, head_dim=128)
    inputs = SimpleNamespace(
        block_offsets=tables, history_lengths=lengths - 1, seq_length=torch.ones_like(lengths), is_decoding=True,
        num_ignored_history=torch.zeros_like(lengths), is_dummy=False, max_q_seqlen=1,
    )  # fmt: skip
    return SimpleNamespace(cache_config=config, model_config=model), inputs


def test_lmdeploys_attention_asks_for_it(kernels, monkeypatch):
    """The call of the hook in LMDeploy's attention, with groups and without them."""
    from lmdeploy import sage_sparse

    arguments = step([(20, [330, 335, 340])], [40], heads=8, kv_heads=2, size=16)
    query, k_cache, v_cache, tables, lengths = arguments
    metadata = SimpleNamespace(quant_policy=0, block_offsets=tables, kv_seqlens=lengths)
    asked = attention_of(), query, k_cache, v_cache, metadata
    assert sage_sparse.attended(*asked, None) is None
    monkeypatch.setattr(prefix_attention, "LAUNCHES_S", 0.0)
    held = prefix_attention.StepGroups(16, torch.device("cpu"))
    held.fill(prefix_attention.find(*engine_of(arguments)))
    monkeypatch.setattr(sage_sparse, "groups", held)
    found = sage_sparse.attended(*asked, None)
    assert float((found - plain_attention(*arguments, 0.3)).abs().max()) < 1e-5
    assert sage_sparse.attended(*asked, torch.zeros(8)) is None  # learned scores
    for place, name, value in ((0, "sliding_window", 64), (0, "alibi", True), (4, "quant_policy", 8)):
        monkeypatch.setattr(asked[place], name, value)
        assert sage_sparse.attended(*asked, None) is None
        monkeypatch.undo()
        monkeypatch.setattr(sage_sparse, "groups", held)


@pytest.mark.slow
def test_groups_in_memory_that_stays(kernels):
    """A CUDA graph runs with the arguments of its capture: only numbers in memory may change from step to step."""
    held = prefix_attention.StepGroups(16, torch.device("cpu"))
    first = step([(10, [170, 175, 200]), (6, [100, 110])], [40])
    second = step([(12, [200, 215]), (9, [160, 165, 170])], [33], seed=1)
    captured = None
    for arguments in (first, second):
        held.fill(groups_of(kernels, arguments))
        # The steps are padded with empty sequences, as LMDeploy pads those that a graph was captured for.
        query, k_cache, v_cache, tables, lengths = arguments
        padded = [torch.nn.functional.pad(each, (*[0, 0] * (each.ndim - 1), 0, 2)) for each in (query, tables, lengths)]
        groups = held.of(len(padded[0]), 64)
        wide = torch.nn.functional.pad(padded[1], (0, 64 - tables.shape[1]))
        captured = captured or groups
        for one, other in zip(vars(captured).values(), vars(groups).values(), strict=True):
            assert one.data_ptr() == other.data_ptr() and one.shape == other.shape if torch.is_tensor(one) else one == other
        assert held.graph_key == (2, 16, 4)  # groups, blocks in common, blocks of a sequence's own
        found = kernels.prefix_aware_attention(padded[0], k_cache, v_cache, wide, padded[2], 0.3, captured)
        assert float((found[:-2] - plain_attention(*arguments, 0.3)).abs().max()) < 1e-5 and not found[-2:].any()
    held.fill(groups_of(kernels, step([(9, [170, 160])], [150])))
    assert held.graph_key == (1, 16, 16)


def test_a_graph_is_captured_for_each_shape_of_groups(monkeypatch):
    from lmdeploy import sage_sparse

    keyed = sage_sparse.keyed(lambda self, size: (size, True))
    assert keyed(None, 4) == (4, True)
    monkeypatch.setattr(sage_sparse, "groups", SimpleNamespace(graph_key=(1, 4, 4)))
    assert keyed(None, 4) == (4, True, (1, 4, 4))


def test_groups_of_a_step_that_pay(kernels, monkeypatch):
    few = step([(20, [330, 335])], [40])
    assert prefix_attention.find(*engine_of(few)) is None  # 320 tokens are read more quickly than kernels are launched
    monkeypatch.setattr(prefix_attention, "LAUNCHES_S", 0.0)
    assert prefix_attention.find(*engine_of(few)).common.tolist() == [20]
    assert prefix_attention.find(*engine_of(step([(20, [330, 900])], [40]))) is None  # too many tokens of their own
    assert prefix_attention.find(*engine_of(step([(10, [170, 175])], [40]))) is None  # too few tokens in common
    engine, inputs = engine_of(few, prefix_attention="auto")
    assert prefix_attention.groups_of(engine, inputs) is None  # tables of the CPU device
    inputs.block_offsets = inputs.block_offsets.to("meta")
    inputs.is_dummy = True
    assert prefix_attention.groups_of(engine, inputs) is None


def brute_force(tables, lengths, block_size, min_tokens):
    """Every leader with every number of common blocks."""
    found, placed = [], set()
    whole = [(length - 1) // block_size for length in lengths]

    def alike(one, other):
        blocks = 0
        while blocks < min(whole[one], whole[other]) and tables[one][blocks] == tables[other][blocks]:
            blocks += 1
        return blocks

    for leader in range(len(lengths)):
        rest = [other for other in range(leader + 1, len(lengths)) if other not in placed]
        best = (0, [], 0)
        for blocks in range(whole[leader], 0, -1):
            joins = [other for other in rest if alike(leader, other) >= blocks]
            if blocks * block_size >= min_tokens and len(joins) * blocks > best[0]:
                best = (len(joins) * blocks, joins, blocks)
        if leader not in placed and best[1]:
            found.append(([leader, *best[1]], best[2]))
            placed |= {leader, *best[1]}
    return found


@settings(max_examples=200)
@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 1), min_size=5, max_size=5), st.integers(0, 20)), min_size=1, max_size=7
    ),
    st.integers(0, 13),
)
def test_groups_equal_those_of_brute_force(kernels, sequences, min_tokens):
    tables = np.array([table for table, _ in sequences], np.int32)
    lengths = [length for _, length in sequences]
    found = kernels.find_groups(tables, lengths, 4, min_tokens)
    wanted = sorted(brute_force(tables.tolist(), lengths, 4, min_tokens))
    if found is None:
        assert not wanted
        return
    parts = np.split(found.members.numpy(), found.starts[1:-1].numpy())
    assert sorted(zip(map(np.ndarray.tolist, parts), found.common.tolist(), strict=True)) == wanted
    shared = np.zeros(len(lengths), int)
    for members, blocks in wanted:
        shared[members] = blocks
    assert found.shared.tolist() == shared.tolist()
    assert found.most_members == max(map(len, parts)) and found.most_common == max(found.common.tolist())


@pytest.mark.parametrize(
    ("members", "starts", "common", "words"),
    [
        ([0, 1], [0, 2], [], "at least one group"),
        ([[0, 1]], [0, 2], [1], "members [1, 2]"),
        ([0, 1], [0, 1], [1], "of 2 members"),
        ([0, 1], [0, 2, 2], [1, 1], "starts [0, 2, 2]"),
        ([0, 1], [0, 2], [0], "common [0]"),
        ([0, 3], [0, 2], [1], "members [0, 3]"),
        ([1, 1], [0, 2], [1], "of the 3 once"),
    ],
)
def test_groups_that_are_none(kernels, members, starts, common, words):
    with pytest.raises(ValueError) as caught:
        kernels.Groups.of(members, starts, common, 3)
    assert words in str(caught.value)


WRONG = {
    "query is torch.float32 [2, 96]": lambda given: given | {"query": given["query"].flatten(1)},
    "query is torch.float64": lambda given: given | {"query": given["query"].double()},
    "v_cache is torch.float16": lambda given: given | {"v_cache": given["v_cache"].half()},
    "with strides": lambda given: given | {"k_cache": given["k_cache"].transpose(2, 3)},
    "kv_lengths is torch.float32": lambda given: given | {"kv_lengths": given["kv_lengths"].float()},
    "query [2, 6, 8]": lambda given: given | {"query": given["query"][..., :8]},
    "query [2, 5, 16]": lambda given: given | {"query": given["query"][:, :5]},
    "v_cache [7,": lambda given: given | {"v_cache": given["v_cache"][:7]},
    "1 block tables": lambda given: given | {"block_tables": given["block_tables"][:1]},
    "tables of 2 blocks": lambda given: given | {"block_tables": given["block_tables"][:, :2]},
    "softcap is 0": lambda given: given | {"softcap": 0.0},
}


@pytest.mark.parametrize("words", WRONG)
def test_arguments_that_do_not_fit(kernels, words):
    arguments = step([(2, [40, 50])])
    names = ("query", "k_cache", "v_cache", "block_tables", "kv_lengths")
    given = dict(zip(names, arguments, strict=True)) | {"scale": 0.3, "groups": groups_of(kernels, arguments)}
    with pytest.raises(ValueError) as caught:
        kernels.prefix_aware_attention(**WRONG[words](given))
    assert words in str(caught.value)


@pytest.mark.parametrize("size", slow_but([80, 128, 256], 128))
def test_kernels_compile_for_an_h100(monkeypatch, tmp_path: Path, size):
    """The interpreter takes what the compiler does not. The assembler that Triton brings needs no GPU."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    with fresh("triton", KERNELS):
        triton, jit, target = (import_module(f"triton{each}") for each in ("", ".runtime.jit", ".backends.compiler"))
        module = import_module(f"{KERNELS}.prefix_aware_attention")
        launched = []
        monkeypatch.setattr(
            jit.JITFunction, "run", lambda self, *values, **options: launched.append((self, values, options))
        )
        arguments = step([(2, [40] * 16)], heads=8, kv_heads=2, size=size, dtype=torch.bfloat16)
        module.prefix_aware_attention(*arguments, 0.3, groups_of(module, arguments), 30.0)
        assert len(launched) == 2
        for number, (kernel, values, options) in enumerate(launched):
            given = dict(zip(kernel.arg_names, values, strict=False)) | options
            constants = {each.name for each in kernel.params if each.is_constexpr}
            variable = [(place, name) for place, name in enumerate(kernel.arg_names) if name not in constants]
            aligned = [
                place for place, name in variable
                if torch.is_tensor(given[name]) or ("stride" in name and given[name] % 16 == 0)
            ]  # fmt: skip
            source = triton.compiler.ASTSource(
                kernel,
                {name: "constexpr" if name in constants else jit.mangle_type(given[name]) for name in kernel.arg_names},
                {name: given[name] for name in constants},
                {(place,): [["tt.divisibility", 16]] for place in aligned},
            )
            found = triton.compile(
                source, target=target.GPUTarget("cuda", 90, 32),
                options={name: given[name] for name in ("num_warps", "num_stages") if name in given},
            )  # fmt: skip
            # A program of a small GPU may have 99 KiB of shared memory. Matrix units need all 64 rows.
            assert found.metadata.shared <= 99 * 1024
            assert ("wgmma" in found.asm["ptx"]) == (number == 0)
