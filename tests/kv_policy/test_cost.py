"""The cost model: arithmetic by hand, fits that find what samples were made of, and corrections that learn."""

import numpy as np
import pytest

from sagellm.core.errors import PolicyError, TierError
from sagellm.kv_policy import (
    CachedBlock,
    CostBenefitModel,
    CostParameters,
    Link,
    MigrationContext,
    MigrationPurpose,
    Tier,
    calibrate_copies,
)
from sagellm.kv_policy.lifetime.exponential import ExponentialLifetime

PARAMETERS = CostParameters(
    links={
        "nvme->cpu": Link(latency_s=0.01, bytes_per_s=1000), "cpu->nvme": Link(latency_s=0.02, bytes_per_s=500),
        "cpu->gpu": Link(latency_s=0.001, bytes_per_s=10_000), "gpu->cpu": Link(latency_s=0.001, bytes_per_s=10_000),
    },
    prefill_step_s=0.5, prefill_token_s=0.01, prefill_token_context_s=0.0001,
)  # fmt: skip


def blocks(count, first_depth=1, **attributes):
    depths = range(first_depth, first_depth + count)
    return tuple(CachedBlock(depth, depth - 1 or None, depth, 10, 100, **attributes) for depth in depths)


def load(count=2, **attributes):
    return MigrationContext(MigrationPurpose.LOAD, Tier.NVME, Tier.CPU, blocks(count), **attributes)


def test_prefill_counts_each_token_at_its_place():
    model = CostBenefitModel(PARAMETERS)
    assert model.prefill_s(10, 20) == pytest.approx(0.5 + sum(0.01 + 0.0001 * before for before in range(20, 30)))


def test_a_load_against_computing():
    transfer_s, recompute_s, net_s = CostBenefitModel(PARAMETERS).evaluate_migration(load(num_tokens_before=30))
    assert transfer_s == pytest.approx(0.01 + 200 / 1000)
    assert recompute_s == pytest.approx(sum(0.01 + 0.0001 * before for before in range(30, 50)))
    assert net_s == pytest.approx(recompute_s - transfer_s)
    assert CostBenefitModel(PARAMETERS).evaluate_migration(load(0)) == (0, 0, 0)


def test_what_a_block_costs_counts_for_loads_too():
    context = load()._replace(blocks=blocks(2, cost_s=7.0))
    assert CostBenefitModel(PARAMETERS).evaluate_migration(context).recompute_s == 14.0


def test_load_on_the_machine_counts():
    model = CostBenefitModel(PARAMETERS)
    alone = model.evaluate_migration(load())
    queued = model.evaluate_migration(load(queued_bytes=3000))
    assert queued.transfer_s == pytest.approx(alone.transfer_s + 3.0) and queued.recompute_s == alone.recompute_s
    assert model.evaluate_migration(load(num_running=4)).recompute_s == pytest.approx(4 * alone.recompute_s)
    assert model.evaluate_migration(load(num_running=1)) == alone
    heedless = CostBenefitModel(PARAMETERS, load_weight=0.0)
    assert heedless.evaluate_migration(load(num_running=4)).recompute_s == pytest.approx(alone.recompute_s)


def test_others_that_leave_for_a_load_count():
    model = CostBenefitModel(PARAMETERS, reuse=0.5)
    enough, one, none = (model.evaluate_loads(load(3, num_free=free)) for free in (3, 1, 0))
    assert enough == model.evaluate_loads(load(3))
    assert [full.transfer_s - free.transfer_s for full, free in zip(one, enough, strict=True)] == pytest.approx([0, 0.05, 0.1])
    assert none[2].net_benefit_s == pytest.approx(enough[2].net_benefit_s - 3 * 0.5 * 100 / 1000)


def test_a_demotion_weighs_what_is_saved_later():
    model = CostBenefitModel(PARAMETERS, reuse=0.5)
    context = MigrationContext(MigrationPurpose.DEMOTE, Tier.GPU, Tier.CPU, blocks(1, first_depth=3))
    again_s = sum(0.01 + 0.0001 * before for before in range(20, 30))
    estimate = model.evaluate_migration(context)
    assert estimate.transfer_s == pytest.approx(0.001 + 0.01) and estimate.recompute_s == pytest.approx(again_s)
    assert estimate.net_benefit_s == pytest.approx(0.5 * (again_s - 0.01) - 0.011)
    known = MigrationContext(MigrationPurpose.DEMOTE, Tier.GPU, Tier.CPU, blocks(1, cost_s=7.0))
    assert model.evaluate_migration(known).recompute_s == 7.0


def test_reuse_comes_from_the_predictor_once_it_knows_something():
    lifetime = ExponentialLifetime()
    model = CostBenefitModel(PARAMETERS, lifetime=lifetime, horizon_s=1000.0)
    context = MigrationContext(MigrationPurpose.DEMOTE, Tier.GPU, Tier.CPU, blocks(1), time_s=200.0)
    unknown = model.evaluate_migration(context).net_benefit_s
    assert unknown == CostBenefitModel(PARAMETERS, reuse=0.5).evaluate_migration(context).net_benefit_s
    for key in range(200):
        lifetime.observe(key, float(key))
    for key in range(30):
        lifetime.observe(key, 200.0)
    assert model.evaluate_migration(context).net_benefit_s < unknown  # about one in seven comes back


def test_a_link_by_way_of_cpu_and_one_that_is_missing():
    model = CostBenefitModel(PARAMETERS)
    assert model.transfer_s(Tier.NVME, Tier.GPU, 1000) == pytest.approx(0.01 + 1.0 + 0.001 + 0.1)
    bare = CostBenefitModel(CostParameters(links={"cpu->gpu": Link(latency_s=0, bytes_per_s=1)}))
    with pytest.raises(PolicyError, match="no link nvme->gpu; known are: cpu->gpu"):
        bare.transfer_s(Tier.NVME, Tier.GPU, 1)


def test_fits_find_what_the_samples_were_made_of():
    random = np.random.default_rng(0)
    truth = CostBenefitModel(PARAMETERS)
    sizes = [(int(random.integers(1, 512)), int(random.integers(0, 4000))) for _ in range(200)]
    prefill = [
        (tokens, before, truth.prefill_s(tokens, before) * random.lognormal(0, 0.02)) for tokens, before in sizes
    ]
    copies = {"nvme->cpu": [(size, truth.transfer_s(Tier.NVME, Tier.CPU, size)) for size in range(100, 5000, 100)]}
    found = CostBenefitModel.fit(prefill, copies).parameters
    assert found.prefill_step_s == pytest.approx(0.5, rel=0.05) and found.prefill_token_s == pytest.approx(
        0.01, rel=0.1
    )
    assert found.prefill_token_context_s == pytest.approx(0.0001, rel=0.05)
    assert found.links["nvme->cpu"].bytes_per_s == pytest.approx(1000) and found.links[
        "nvme->cpu"
    ].latency_s == pytest.approx(0.01)
    assert found.links["cpu->gpu"] == CostParameters().links["cpu->gpu"]  # no samples: as before
    error = found.errors["prefill"]
    assert (error.num_samples, error.num_held_out) == (200, 40) and 0.005 < error.median < 0.03 < error.p90 < 0.06
    assert found.errors["nvme->cpu"].p90 < 1e-6


def test_samples_of_one_size_make_no_fixed_time_of_it():
    """With all of it in the fixed part nothing would be worth a move, and with what is not moved there is nothing to learn."""
    found = CostBenefitModel.fit([(512, 0, 1.0), (500, 0, 1.1)] * 4, {"nvme->cpu": [(1000, 2.0)] * 8}).parameters
    assert (found.prefill_step_s, found.prefill_token_context_s) == (0, 0)
    assert found.prefill_token_s == pytest.approx(1 / 512, rel=0.1)
    assert found.links["nvme->cpu"].latency_s == 0 and found.links["nvme->cpu"].bytes_per_s == pytest.approx(500)


def test_no_coefficient_is_negative():
    # Seconds that fall with size: the best that is possible is a constant.
    found = CostBenefitModel.fit(
        copies={"cpu->gpu": [(size, 2.0 - size / 10_000) for size in range(0, 5000, 100)]}
    ).parameters
    link = found.links["cpu->gpu"]
    assert link.latency_s == pytest.approx(1.74, abs=0.05)
    assert link.bytes_per_s == CostParameters().links["cpu->gpu"].bytes_per_s  # nothing is moved in no time
    assert found.errors["cpu->gpu"].p90 > 0.05


def test_prefills_that_take_no_longer_for_more_tokens_tell_nothing_of_a_token():
    found = CostBenefitModel.fit([(tokens, 0, 2.0 - tokens / 1000) for tokens in range(1, 1000, 20)]).parameters
    assert found.prefill_step_s > 0.5 and found.prefill_token_s == CostParameters().prefill_token_s


@pytest.mark.parametrize("samples", [[(1, 1.0)] * 4, [(0, 1.0)] * 9, [(1, 0.0)] * 9, [(-1, 1.0)] * 9, [(1, float("nan"))] * 9])
def test_samples_that_are_no_measurements(samples):
    with pytest.raises(PolicyError, match="of cpu->gpu"):
        CostBenefitModel.fit(copies={"cpu->gpu": samples})


def test_corrections_learn_and_stay_in_bounds():
    model = CostBenefitModel(PARAMETERS)
    truth_s = 3 * model.transfer_s(Tier.NVME, Tier.CPU, 1000)
    for _ in range(100):
        model.observe("nvme->cpu", model.transfer_s(Tier.NVME, Tier.CPU, 1000), truth_s)
    assert model.transfer_s(Tier.NVME, Tier.CPU, 1000) == pytest.approx(truth_s, rel=0.01)
    assert model.transfer_s(Tier.CPU, Tier.NVME, 1000) == CostBenefitModel(PARAMETERS).transfer_s(
        Tier.CPU, Tier.NVME, 1000
    )
    for measured_s in (0.0, -1.0, float("inf"), float("nan")):
        model.observe("nvme->cpu", 1.0, measured_s)
    assert model.transfer_s(Tier.NVME, Tier.CPU, 1000) == pytest.approx(truth_s, rel=0.01)
    for _ in range(500):
        model.observe("prefill", 1.0, 1e9)
    assert model.prefill_s(10) == pytest.approx(100 * CostBenefitModel(PARAMETERS).prefill_s(10))
    with pytest.raises(PolicyError, match="unknown kind 'decode'; known are: prefill, "):
        model.observe("decode", 1.0, 1.0)


def test_json_holds_all_of_it():
    model = CostBenefitModel(PARAMETERS)
    model.observe("prefill", 1.0, 2.0)
    copy = CostBenefitModel.from_json(model.to_json(), reuse=0.25)
    assert copy.parameters == PARAMETERS and copy.reuse == 0.25 and copy.prefill_s(7, 9) == model.prefill_s(7, 9)
    parameters = '{"parameters": {}, '
    for text in (
        "", "[]", '{"parameters": {"speed": 1}}', '{"corrections": {}}', '{"parameters": {"prefill_token_s": Infinity}}',
        parameters + '"extra": 1}', parameters + '"corrections": {"somewhere": 1}}',
        *(f'{parameters} "corrections": {{"prefill": {bad}}}}}' for bad in ("NaN", "-5", "0", "1e3")),
    ):  # fmt: skip
        with pytest.raises(PolicyError, match="no cost model"):
            CostBenefitModel.from_json(text)


@pytest.mark.parametrize("options", [{"reuse": 2}, {"horizon_s": -1}, {"smoothing": 0}, {"load_weight": True}])
def test_options_out_of_range(options):
    with pytest.raises(PolicyError):
        CostBenefitModel(**options)


def test_copies_are_measured(tmp_path):
    samples = calibrate_copies(tmp_path, sizes=(4096, 1 << 16), repeats=3)
    assert set(samples) == {"gpu->cpu", "cpu->gpu", "cpu->nvme", "nvme->cpu"}
    for measured in samples.values():
        assert sorted({size for size, _ in measured}) == [4096, 1 << 16] and len(measured) == 6
        assert all(seconds > 0 for _, seconds in measured)
    assert CostBenefitModel.fit(copies=samples).parameters.errors["nvme->cpu"].num_samples == 6
    assert list(tmp_path.iterdir()) == []
    assert set(calibrate_copies(sizes=(4096,), repeats=1)) == {"gpu->cpu", "cpu->gpu"}
    with pytest.raises(TierError, match="cannot measure"):
        calibrate_copies(tmp_path / "missing", sizes=(4096,), repeats=1)
