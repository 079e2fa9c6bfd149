"""The conformance kit of devices finds each planted fault, and nothing in the CPU device."""

import pytest
import torch

from sagellm.engines.lmdeploy.contract import architectures, operators
from sagellm.engines.lmdeploy.contract import device as contract
from sagellm.engines.lmdeploy.cpu.backend import CpuOpsBackend


def found_in(bench) -> dict[str, str]:
    faults: dict[str, str] = {}
    missing = operators.missing_operators(bench)
    seen = operators.check_operators(bench, 0, faults.setdefault, missing)
    assert seen == set(operators.RULES)
    return faults


@pytest.fixture
def bench():
    return contract.operators_of("cpu")._replace(dtypes=(torch.float32,))


def test_the_cpu_device_in_every_type():
    bench = contract.operators_of("cpu")
    assert bench.dtypes == (torch.float32, torch.bfloat16)
    assert found_in(bench) == {}
    missing = operators.missing_operators(bench)
    assert set(missing) == {"LoRA", "FusedMoEW8A8", "FusedMoEBlockedF8"}


def changed(operator, change):
    """A back end in which the built operator has been changed: `change(impl)` returns another forward."""

    class Builder:
        def __init__(self, own):
            self._own = own

        def build(self, *arguments, **options):
            impl = self._own.build(*arguments, **options)
            forward = change(impl)
            if isinstance(impl, torch.nn.Module):
                impl.forward = forward
            else:
                object.__setattr__(impl, "forward", forward)
            return impl

    class Backend(CpuOpsBackend):
        @classmethod
        def get_layer_impl_builder(cls, layer_type):
            own = super().get_layer_impl_builder(layer_type)
            return Builder(own) if layer_type.name == operator else own

    return Backend


def with_attribute(name, value):
    def change(impl):
        own = impl.forward
        setattr(impl, name, value(getattr(impl, name)))
        return own

    return change


def of_call(edit):
    """`edit(forward, *arguments, **options)` stands for the operator."""

    def change(impl):
        own = impl.forward
        return lambda *arguments, **options: edit(own, *arguments, **options)

    return change


def without_bias(forward, x, weight, bias=None, *more):
    return forward(x, weight, None, *more)


def without_residual(forward, x, weight, residual=None):
    return forward(x, weight) if residual is None else (forward(x, weight), x + residual)


def halves_swapped(forward, query, key, cos, sin, inplace=True):
    return forward(query, key, cos, -sin, inplace=inplace)


def blocks_off_by_one(forward, query, key, value, k_cache, v_cache, metadata, **more):
    metadata.block_offsets = (metadata.block_offsets + metadata.is_decoding) % operators.NUM_BLOCKS
    return forward(query, key, value, k_cache, v_cache, metadata, **more)


def stale_values(forward, query, key, value, k_cache, v_cache, metadata, **more):
    return forward(query, key, value.roll(1, 0), k_cache, v_cache, metadata, **more)


def whole_cache_read(forward, query, key, value, k_cache, *more, **options):
    """Masked keys weigh nothing, but nothing times NaN is NaN."""
    return forward(query, key, value, k_cache, *more, **options) + 0.0 * k_cache.sum()


def sinks_forgotten(forward, *arguments, learnable_sink=None, **more):
    return forward(*arguments, learnable_sink=None, **more)


def heads_in_another_order(forward, query, *arguments, **more):
    return forward(query.flip(1), *arguments, **more).flip(1)


def experts_swapped(forward, x, weights, ids, *arguments, **more):
    return forward(x, weights, ids.flip(1), *arguments, **more)


def weights_of_raw_scores(forward, x):
    weights, ids = forward(x)
    return weights / weights.sum(-1, keepdim=True), ids


def seeds_by_row(forward, scores, seeds, offsets, indices=None):
    return forward(scores, torch.full_like(seeds, len(seeds)) + torch.arange(len(seeds)), offsets, indices)


def places_ignored(forward, scores, seeds, offsets, indices=None):
    return forward(scores, seeds, torch.zeros_like(offsets), indices)


FAULTS = {
    "a bias is forgotten": ("Linear", of_call(without_bias), "linear"),
    "a residual is forgotten": ("RMSNorm", of_call(without_residual), "norms"),
    "another epsilon": ("RMSNorm", with_attribute("epsilon", lambda value: 1e-6), "norms"),
    "rotary of the wrong half": ("ApplyRotaryEmb", of_call(halves_swapped), "rotary"),
    "a block off by one": ("PagedAttention", of_call(blocks_off_by_one), "attention"),
    "a stale scale": ("PagedAttention", with_attribute("scale", lambda value: 1.0), "attention"),
    "values of the wrong token": ("PagedAttention", of_call(stale_values), "attention"),
    "heads in another order": ("PagedAttention", of_call(heads_in_another_order), "attention"),
    "slots without a token are read": ("PagedAttention", of_call(whole_cache_read), "unwritten"),
    "a window off by one": ("PagedAttention", with_attribute("window", lambda value: value and value + 1), "attention_kinds"),
    "scores are not capped": ("PagedAttention", with_attribute("softcap", lambda value: 0.0), "attention_kinds"),
    "sinks are forgotten": ("PagedAttention", of_call(sinks_forgotten), "attention_kinds"),
    "experts are swapped": ("FusedMoE", of_call(experts_swapped), "experts"),
    "weights of the best add up to one": ("SoftmaxTopK", of_call(weights_of_raw_scores), "experts"),
    "seeds are those of the row": ("MultinomialSampling", of_call(seeds_by_row), "sampling"),
    "places are ignored": ("MultinomialSampling", of_call(places_ignored), "sampling"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(bench, name):
    operator, change, rule = FAULTS[name]
    faults = found_in(bench._replace(backend=changed(operator, change)))
    assert rule in faults, faults


def test_a_wrong_mask_is_found_in_answers(monkeypatch):
    from sagellm.engines.lmdeploy.cpu.operators.attention import CpuAttentionImpl

    def mask(self, span, q_len, past):
        return torch.ones(q_len, past + q_len, dtype=torch.bool)

    monkeypatch.setattr(CpuAttentionImpl, "_mask", mask)
    monkeypatch.setattr(CpuAttentionImpl, "_limits", lambda self, num_tokens: True)
    faults: list[str] = []
    architectures.check_architectures("cpu", "float32", 0, lambda rule, text: faults.append(text), ["GptOss"])
    assert any(text.startswith("GptOss, after 300 tokens: token") for text in faults), faults
