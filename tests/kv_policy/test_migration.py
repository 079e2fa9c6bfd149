"""Which blocks are moved: all, none, or those that are worth it."""

import pytest

from sagellm.core.errors import PolicyError
from sagellm.kv_policy import (
    CachedBlock,
    CostBenefitModel,
    CostParameters,
    Link,
    MigrationContext,
    MigrationPurpose,
    Tier,
    make_migration_policy,
)  # fmt: skip
from sagellm.kv_policy.lifetime.exponential import ExponentialLifetime


def model(latency_s=0.0, bytes_per_s=1000.0, **options):
    links = {name: Link(latency_s=latency_s, bytes_per_s=bytes_per_s) for name in ("nvme->cpu", "cpu->nvme")}
    parameters = CostParameters(links=links, prefill_step_s=0, prefill_token_s=0.01, prefill_token_context_s=0.001)
    return CostBenefitModel(parameters, **options)


def load(*sizes, **attributes):
    blocks = tuple(CachedBlock(10 + place, None, place + 1, 10, size) for place, size in enumerate(sizes))
    return MigrationContext(MigrationPurpose.LOAD, Tier.NVME, Tier.CPU, blocks, **attributes)


def demote(*blocks):
    return MigrationContext(MigrationPurpose.DEMOTE, Tier.CPU, Tier.NVME, blocks, time_s=100.0)


def keys(decision):
    return list(decision.plan.block_ids)


def test_always_and_never():
    context = load(1, 1)
    everything, nothing = (make_migration_policy(name).plan(context) for name in ("always", "never"))
    assert keys(everything) == [10, 11] and keys(nothing) == []
    assert (everything.plan.src_tier, everything.plan.dst_tier) == (Tier.NVME, Tier.CPU) and nothing.reason == "never"


def test_loads_stop_where_they_save_most():
    policy = make_migration_policy("cost", model=model())
    # Ten tokens cost .145, .245, .345 s; a block of 100 bytes takes .1 s, one of 300 takes .3 s.
    assert keys(policy.plan(load(100, 100, 300))) == [10, 11, 12]
    assert keys(policy.plan(load(100, 100, 400))) == [10, 11]
    assert keys(policy.plan(load(300, 100, 100))) == [10, 11, 12]  # the first one alone would not be worth it
    decision = policy.plan(load(100, 100, 400))
    assert decision.net_benefit == pytest.approx(0.145 + 0.245 - 0.2) and "s to load" in decision.reason


def test_loads_that_cost_more_than_computing_are_refused():
    policy = make_migration_policy("cost", model=model(latency_s=5.0))
    decision = policy.plan(load(1, 1, 1))
    assert keys(decision) == [] and decision.net_benefit == 0.0
    assert keys(make_migration_policy("cost", model=model()).plan(load(100, 100, queued_bytes=10_000))) == []
    assert keys(policy.plan(load(1, 1, 1, num_running=50))) == [10, 11, 12]
    assert keys(policy.plan(load())) == []


def test_of_equal_parts_the_longest():
    parameters = CostParameters(
        links={"nvme->cpu": Link(latency_s=0, bytes_per_s=64)}, prefill_token_s=0.125, prefill_token_context_s=0
    )
    policy = make_migration_policy("cost", model=CostBenefitModel(parameters))
    assert keys(policy.plan(load(16, 80, 80))) == [10, 11, 12]  # 1 s saved, then nothing lost and nothing won


def test_demotions_keep_what_is_worth_it():
    policy = make_migration_policy("cost", model=model(reuse=0.5))
    deep, shallow, large = (
        CachedBlock(1, None, 20, 10, 100),
        CachedBlock(2, None, 1, 10, 100),
        CachedBlock(3, None, 20, 10, 5000),
    )
    assert keys(policy.plan(demote(shallow, deep, large))) == [1]
    assert keys(policy.plan(demote(shallow))) == [] and keys(policy.plan(demote())) == []
    slow = make_migration_policy("cost", model=model(latency_s=9.0))
    assert keys(slow.plan(demote(deep))) == []  # worth its bytes, not the whole move


def test_demotions_learn_who_comes_back():
    policy = make_migration_policy("cost", model=model(), lifetime=ExponentialLifetime())
    for key in range(60):
        policy.observe_use([key], float(key))
    block = CachedBlock(5, None, 20, 10, 100)
    assert keys(policy.plan(demote(block))) == [5]  # nothing is known yet
    for number in range(3000):
        policy.observe_use([1000 + number], 60.0)
    for number in range(30):
        policy.observe_use([1000 + number], 61.0)
    assert keys(policy.plan(demote(block))) == []  # hardly anything came back
    for number in range(3000):
        policy.observe_use([1000 + number], 62.0 + number / 1000)
    assert keys(policy.plan(demote(CachedBlock(3999, None, 20, 10, 100)))) == []  # used twice; few were used a third time


def test_a_predictor_by_its_name():
    policy = make_migration_policy("cost", lifetime="Learned")
    policy.observe_use([1], 0.0)
    assert policy.model.lifetime.name == "learned"
    for wrong, message in (("soon", "unknown lifetime predictor 'soon'"), (5, "lifetime=5; give a lifetime predictor")):
        with pytest.raises(PolicyError, match=message):
            make_migration_policy("cost", lifetime=wrong)


def test_a_model_from_a_file(tmp_path):
    file = tmp_path / "cost.json"
    file.write_text(model(latency_s=5.0).to_json())
    assert keys(make_migration_policy("cost", model=str(file)).plan(load(1))) == []
    with pytest.raises(PolicyError, match="cannot read the cost model"):
        make_migration_policy("cost", model=tmp_path / "missing.json")
    file.write_text("{}")
    with pytest.raises(PolicyError, match="no cost model"):
        make_migration_policy("cost", model=file)
