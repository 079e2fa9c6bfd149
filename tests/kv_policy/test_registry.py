"""Policies and predictors by name: spelling, packages of others, and what cannot be found."""

import re
from importlib.metadata import EntryPoint

import pytest

from sagellm.core import registry as core_registry
from sagellm.core.errors import PolicyError
from sagellm.kv_policy import (
    EvictionPolicy,
    find_lifetime_predictor,
    find_migration_policy,
    find_policy,
    lifetime_predictor_names,
    make_lifetime_predictor,
    make_migration_policy,
    make_policy,
    migration_policy_names,
    policy_names,
    registry,
)  # fmt: skip
from sagellm.kv_policy.eviction.lru import Lru
from sagellm.kv_policy.eviction.s3fifo import S3Fifo
from sagellm.kv_policy.eviction.twoq import TwoQ
from sagellm.kv_policy.eviction.wtinylfu import WTinyLfu
from sagellm.kv_policy.migration.always import Always

HERE = __name__
NAMES = sorted("fifo lru lfu arc s3fifo sieve twoq slru wtinylfu gdsf prefix_lru prefix_depth prefix_reuse belady".split())


class Mine(Lru):
    name = "mine"


class Nameless(EvictionPolicy):
    on_insert = on_hit = on_remove = select_victims = None


class Broken(Lru):
    def __init__(self, capacity):
        raise OSError("no disk")


@pytest.fixture
def offered(monkeypatch):
    entries = [
        EntryPoint("my-policy", f"{HERE}:Mine", "sagellm.kv_policies"),
        EntryPoint("lru", f"{HERE}:Mine", "sagellm.kv_policies"),
        EntryPoint("gone", "sagellm_nowhere:Thing", "sagellm.kv_policies"),
    ]
    monkeypatch.setattr(
        core_registry, "entry_points", lambda group: [entry for entry in entries if entry.group == group]
    )


def test_all_names_are_known():
    assert policy_names()[: len(NAMES)] == NAMES
    assert migration_policy_names()[:3] == ["always", "cost", "never"]
    assert lifetime_predictor_names()[:3] == ["exponential", "history", "learned"]
    for name in NAMES:
        assert find_policy(name, reference=True).name == name == find_policy(name).name
    for name in migration_policy_names():
        assert make_migration_policy(name).name == name == find_migration_policy(name).name
    for name in lifetime_predictor_names():
        assert make_lifetime_predictor(name).name == name == find_lifetime_predictor(name).name


@pytest.mark.parametrize(
    ("name", "kind"),
    [("S3-FIFO", S3Fifo), ("s3_fifo", S3Fifo), ("LRU", Lru), ("2Q", TwoQ), ("Two_Q", TwoQ), ("W-TinyLFU", WTinyLfu)],
)  # fmt: skip
def test_spelling_does_not_matter(name, kind):
    assert find_policy(name, reference=True) is kind


def test_policies_of_others(offered):
    assert policy_names()[len(NAMES) :] == ["gone", "my-policy"]
    assert find_policy("my_policy") is Mine is find_policy(f"{HERE}:Mine")
    assert find_policy("lru", reference=True) is Lru  # a package cannot put its own in the place of one of these
    assert isinstance(make_policy(f"{HERE}:Mine", 4), Mine)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("lruu", f"unknown eviction policy 'lruu'; known are: {', '.join(NAMES)}, gone, my-policy. Or name a"),
        ("gone", "eviction policy gone: cannot load sagellm_nowhere:Thing"),
        ("sagellm_nowhere:Thing", "eviction policy sagellm_nowhere:Thing: cannot import sagellm_nowhere"),
        (f"{HERE}:Missing", f"module {HERE} has no Missing"),
        (f"{HERE}:NAMES", "no eviction policy; give a subclass of sagellm.kv_policy.base.EvictionPolicy."),
        ("sagellm.kv_policy.migration.always:Always", "no eviction policy"),
        (f"{HERE}:Nameless", f"eviction policy {HERE}:Nameless has no name; give the class"),
        ("sagellm.kv_policy.base:EvictionPolicy", "is abstract; define on_hit, on_insert, on_remove, select_victims."),
    ],
)  # fmt: skip
def test_what_cannot_be_found(offered, name, message):
    with pytest.raises(PolicyError, match=re.escape(message)):
        find_policy(name)


def test_other_kinds_list_their_own():
    with pytest.raises(PolicyError, match="unknown migration policy 'maybe'; known are: always, cost, never"):
        find_migration_policy("maybe")
    with pytest.raises(PolicyError, match="unknown lifetime predictor 'x'; known are: exponential, history, learned"):
        find_lifetime_predictor("x")
    assert find_migration_policy("sagellm.kv_policy.migration.always:Always") is Always


@pytest.mark.parametrize(
    ("name", "options"), [(f"{HERE}:Broken", {}), (f"{HERE}:Mine", {"size": 2}), ("s3-fifo", {"size": 2})]
)
def test_what_cannot_be_built(name, options):
    with pytest.raises(PolicyError, match="no disk|no options"):
        make_policy(name, 4, **options)


def test_a_migration_policy_with_unknown_options_is_refused():
    with pytest.raises(PolicyError, match="migration policy always cannot be built"):
        make_migration_policy("always", often=True)


def test_the_native_class_goes_first_unless_the_reference_is_wanted(monkeypatch):
    monkeypatch.setitem(registry.NATIVE, "lru", Mine)
    assert find_policy("LRU") is Mine and find_policy("lru", reference=True) is Lru
    assert find_policy("sagellm.kv_policy.eviction.lru:Lru") is Lru
