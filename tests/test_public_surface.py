"""Everything that users could name before the package was reorganized still works, or CHANGELOG.md says why it went."""

import ast
import importlib
import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import click
import pytest

ROOT = Path(__file__).parents[1]
BEFORE = json.loads((Path(__file__).parent / "public_surface.json").read_text())
REGISTRIES = {
    "policy": ("sagellm.kv_policy.registry", "policy_names"),
    "migration": ("sagellm.kv_policy.registry", "migration_policy_names"),
    "lifetime": ("sagellm.kv_policy.registry", "lifetime_predictor_names"),
    "strategy": ("sagellm.scheduler_ir.strategies.registry", "strategy_names"),
    "speculative": ("sagellm.accel.speculative.registry", "speculator_names"),
    "backend": ("sagellm.comm_backend.registry", "backend_names"),
    "channel": ("sagellm.comm_backend.kv_transfer.registry", "channel_names"),
}


@cache
def removed() -> frozenset[str]:
    """Names in backticks with which the items of the section `Removed or renamed` of the changelog begin."""
    section = re.search(r"^## Removed or renamed$(.*?)(?=^## |\Z)", (ROOT / "CHANGELOG.md").read_text(), re.M | re.S)
    assert section, "CHANGELOG.md has no section 'Removed or renamed'"
    begins = re.findall(r"^- ((?:`[^`]+`(?:,\s+|\s+and\s+)?)+)", section[1], re.M)
    return frozenset(name for begin in begins for name in re.findall(r"`([^`]+)`", begin))


@cache
def sources() -> tuple[ast.Module, ...]:
    return tuple(ast.parse(file.read_text()) for file in sorted((ROOT / "sagellm").rglob("*.py")))


@cache
def module_names() -> frozenset[str]:
    """Classes, and names that a module assigns or imports at its top level."""
    found: set[str] = set()
    for tree in sources():
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Assign):
                found.update(target.id for target in node.targets if isinstance(target, ast.Name))
            elif isinstance(node, ast.ImportFrom):
                found.update(alias.asname or alias.name for alias in node.names)
    return frozenset(found)


@cache
def texts() -> frozenset[str]:
    """String constants of the package."""
    return frozenset(
        node.value
        for tree in sources()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )


def find_command(line: str) -> click.Command:
    """The command that a line such as `sagellm policy list` or `python -m benchmarks.runner` runs."""
    *_, program = re.match(r"(python -m |python )?(\S+)", line).groups()
    if program == "sagellm":
        from sagellm.cli import main

        command = main
        for name in line.split()[1:]:
            command = command.get_command(click.Context(command), name)
            assert command is not None, f"{line}: there is no {name}"
        return command
    module = importlib.import_module(program.removesuffix(".py"))
    (command,) = [v for v in vars(module).values() if isinstance(v, click.Command) and v.callback.__module__ == module.__name__]
    return command


def flags(command: click.Command) -> Iterator[str]:
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            yield from (*parameter.opts, *parameter.secondary_opts)


@pytest.mark.parametrize("line", BEFORE["commands"])
def test_commands_and_flags_are_there(line: str) -> None:
    if line in removed():
        return
    there = set(flags(find_command(line)))
    missing = [flag for flag in BEFORE["commands"][line] if flag not in there and f"{line} {flag}" not in removed()]
    assert not missing, f"{line} lacks {missing}"


def test_removed_classes_are_gone() -> None:
    """An item that begins with a class that is still there would hide its loss later."""
    assert not sorted(removed() & set(BEFORE["classes"]) & module_names())


def test_classes_are_there() -> None:
    assert not sorted(set(BEFORE["classes"]) - module_names() - removed())


@pytest.mark.parametrize("package", BEFORE["exports"])
def test_exports_are_importable(package: str) -> None:
    if package in removed():
        return
    module = importlib.import_module(package)
    missing = [n for n in BEFORE["exports"][package] if not hasattr(module, n) and not {n, f"{package}.{n}"} & removed()]
    assert not missing, f"{package} lacks {missing}"


def test_metrics_are_there() -> None:
    assert not sorted(set(BEFORE["metrics"]) - texts() - removed())


@pytest.mark.parametrize("kind", BEFORE["plug_ins"])
def test_names_of_plug_ins_are_known(kind: str) -> None:
    module, function = REGISTRIES[kind]
    known = getattr(importlib.import_module(module), function)()
    assert not [name for name in BEFORE["plug_ins"][kind] if name not in known and name not in removed()]


@pytest.mark.parametrize("folder, key, suffix", [("scenarios", "scenarios", ".py"), ("configs", "presets", ".yaml")])
def test_benchmarks_are_there(folder: str, key: str, suffix: str) -> None:
    there = {file.stem for file in (ROOT / "benchmarks" / folder).glob(f"*{suffix}")}
    assert not sorted(set(BEFORE[key]) - there - removed())


NAMED = {  # by users, who look for them here
    "sagellm": (
        "ControlPlaneManager DraftModelStrategy DynamicLookaheadStrategy NgramStrategy SageConfig SpeculativeStrategy "
        "UnifiedInferenceClient"
    ),
    "sagellm.accel": (
        "AccelConfig AccelController BaseQuantizer BranchInfo CoTAccelController CoTStep DraftModel ParallelDecodeResult "
        "ParallelPrefillResult QuantizationProfile SchedulePlan ScheduleResult SkeletonDecodeResult SkeletonParseResult "
        "SkeletonPrefillResult SparsePolicy SpecSoT TaskData Verifier"
    ),
    "sagellm.comm_backend": (
        "CommBackendProtocol CommConfig CommFusion KVTransferChannel OverlapWindow TopologyInfo TopologyManager TransferPlan"
    ),
    "sagellm.control_plane": "BaseService ControlPlaneManager EngineKind Router ScalingPolicy UnifiedInferenceClient",
    "sagellm.core": "ConfigError Plugin RequestMetadata SageConfig SageError SagePorts",
    "sagellm.engines": "BaseEngine CapabilityDescriptor EngineInfo KVCacheSchema QuantizationProfile",
    "sagellm.kv_policy": (
        "CostBenefitModel EvictionDecision EvictionPolicy LifetimePredictor MigrationDecision MigrationPolicy PolicyContext"
    ),
    "sagellm.kv_runtime": (
        "AllocationResult BlockManager HierarchyManager KVBackendProtocol KVBlockInfo KVMigrator KVPool MigrationPlan "
        "QuotaManager"
    ),
    "sagellm.prefix_reuse": "PrefixEntry PrefixHit PrefixMatcher PrefixReuseIndex PrefixReuseMetrics",
    "sagellm.scheduler_ir": "ExecutionPlan ExecutorAPI IRBuilder IRGraph IRNode PDSeparator SchedulingStrategy",
    "benchmarks.runner": "BenchmarkRunner",
}  # fmt: skip


@pytest.mark.parametrize("package", NAMED)
def test_named_classes_are_imported_from_their_package(package: str) -> None:
    module = importlib.import_module(package)
    for name in NAMED[package].split():
        assert isinstance(getattr(module, name), type), f"{package}.{name}"


def test_every_exported_name_has_its_home() -> None:
    for file in (ROOT / "sagellm").glob("*/__init__.py"):
        module = importlib.import_module(f"sagellm.{file.parent.name}")
        assert all(hasattr(module, name) for name in getattr(module, "__all__", ()))
