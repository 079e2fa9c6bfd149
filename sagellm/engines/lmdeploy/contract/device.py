"""Contract of a device of the PyTorch engine: `sagellm check device NAME`. LMDeploy finds devices by entry point alone."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch

from sagellm.core.contract import Broke, ContractReport, Played, Report, Scenario, Suite, play, run_scenarios
from sagellm.core.devices import GROUP, DeviceReport, package_of
from sagellm.core.errors import ConfigError
from sagellm.core.registry import Registry, load_offered
from sagellm.engines.lmdeploy.contract import architectures, operators

__all__ = ["DEVICES", "RULES", "SUITE", "Device", "operators_of"]


class Device(Protocol):
    """Interface of a device in the patched LMDeploy. `CpuDevice` documents every method."""

    torch_device: str
    max_batch_size: int
    runtime: Any

    def validate(self, config: Any) -> None: ...
    def activate(self) -> None: ...
    def ops_backend(self) -> type: ...
    def dtype(self, name: str, hf_config: Any) -> str: ...
    def window_size(self, size: int) -> int: ...
    def memory(self) -> tuple[int, int]: ...
    def seed(self) -> int: ...
    def to_device(self, value: Any) -> Any: ...
    def apply_token_bitmask(self, logits: torch.Tensor, bitmask: torch.Tensor) -> None: ...
    async def run_step(self, step: Callable[..., Any], agent: Any, args: tuple, kwargs: dict) -> Any: ...
    def end_steps(self, agent: Any) -> None: ...
    def push(self, push: Callable[..., None], agent: Any, args: tuple, kwargs: dict) -> None: ...


MEMBERS = (
    *Device.__annotations__, *(name for name, value in vars(Device).items() if inspect.isfunction(value) and name[0] != "_"),
)  # fmt: skip
RULES = {
    "builds": f"has {', '.join(MEMBERS)}",
    "validates": "takes a plain configuration, and refuses, with ConfigError, one that it cannot honour",
    "memory": "says how many bytes are available, and of how many",
    "copies": "copies a tensor that the engine hands over",
    "bitmask": "forbids the tokens of a bit mask, and no others",
    **operators.RULES,
    **architectures.RULES,
}


class _Devices(Registry[Any]):
    """Devices by the name of their entry point. They are objects, not classes."""

    def find(self, name: str, **flags: Any) -> Any:
        """Return the device. Raises ConfigError: there is no such entry point, or it cannot be loaded."""
        found = load_offered(name, GROUP, self.what, ConfigError)
        if found is None:
            known = ", ".join(self.names()) or "none installed"
            raise ConfigError(
                f"unknown device {name!r}; known are: {known}. Offer yours as an entry point of the group {GROUP}."
            )
        return found

    def describe(self, name: str) -> dict[str, Any]:
        """Return facts for lists."""
        try:
            device = self.find(name)
        except ConfigError as error:
            return {"options": {}, "devices": "", "here": str(error), "summary": "", "class": ""}
        return {**self._facts(type(device)), "options": {}, "devices": device.torch_device}


DEVICES = _Devices("device", Device, ConfigError, GROUP)


def parts(name: str, seed: int, report: Report) -> Played:
    """Ask the device itself."""
    from lmdeploy import PytorchEngineConfig

    device = DEVICES.find(name)
    if missing := [member for member in MEMBERS if not hasattr(device, member)]:
        report("builds", f"it has no {', '.join(missing)}.")
        raise Broke
    plain = PytorchEngineConfig(device_type=name, num_gpu_blocks=64, max_batch_size=device.max_batch_size)
    try:
        device.validate(plain)
    except ConfigError as error:
        report("validates", f"it refused a plain configuration: {error}")
    for field, value in (("dtype", "float1"), ("tp", 0), ("num_gpu_blocks", -1), ("block_size", 3)):
        bad = PytorchEngineConfig(device_type=name)
        setattr(bad, field, value)
        try:
            device.validate(bad)
            report("validates", f"it took {field}={value!r}.")
        except ConfigError:
            pass
        except Exception as error:
            report("validates", f"{field}={value!r} raised {type(error).__name__}; raise ConfigError.")
    available, total = device.memory()
    if not 0 < available <= total:
        report("memory", f"{available} of {total} bytes are available.")
    values = torch.arange(8)
    device.to_device(values).add_(1)
    if values.tolist() != list(range(8)):
        report("copies", "a change of what `to_device` returned changed the tensor that was handed over.")
    for kind in (torch.float32, torch.bfloat16):
        logits = torch.zeros((1, 40), dtype=kind, device=device.torch_device)
        device.apply_token_bitmask(logits, torch.tensor([[5, 1]], dtype=torch.int32, device=device.torch_device))
        if (allowed := torch.isfinite(logits[0]).nonzero().flatten().tolist()) != [0, 2, 32]:
            report("bitmask", f"allowed were tokens 0, 2 and 32; it left {allowed} in {kind}.")
    return Played(1, set(RULES) - {*operators.RULES, *architectures.RULES})


def operators_of(name: str) -> operators.DeviceOperators:
    """Return the operators of a device, which is activated in this process."""
    from lmdeploy import sage_device

    device = DEVICES.find(name)
    sage_device.activate(name)
    dtypes = tuple(kind for kind in (torch.float32, torch.bfloat16, torch.float16) if takes(name, kind))
    return operators.DeviceOperators(device.ops_backend(), device.torch_device, dtypes)


def takes(name: str, kind: torch.dtype) -> bool:
    """Whether a device computes in a type."""
    from lmdeploy import PytorchEngineConfig

    config = PytorchEngineConfig(device_type=name)
    config.dtype = str(kind).removeprefix("torch.")  # its own check knows the devices of LMDeploy alone
    try:
        DEVICES.find(name).validate(config)
    except ConfigError:
        return False
    return True


def compare_operators(name: str, seed: int, report: Report) -> Played:
    """Compare each operator with a plain formula. Operators that the device does not have are no fault."""
    ops = operators_of(name)
    return Played(1, operators.check_operators(ops, seed, report, operators.missing_operators(ops)))


def compare_architectures(name: str, seed: int, report: Report) -> Played:
    """Run a tiny model of each architecture."""
    dtype = "float32" if takes(name, torch.float32) else "bfloat16"
    architectures.check_architectures(name, dtype, seed, report)
    return Played(1, set(architectures.RULES))


SCENARIOS = {
    "parts": Scenario(parts), "operators": Scenario(compare_operators), "architectures": Scenario(compare_architectures),
}  # fmt: skip


class _DeviceSuite(Suite):
    def prepare(self, registry: Registry, name: str, options: dict[str, Any], **flags: Any) -> Callable[..., ContractReport]:
        """Find the device."""
        registry.find(name)
        if options:
            raise ConfigError(f"device {name} takes no options; got {', '.join(sorted(options))}.")
        run = partial(run_scenarios, RULES, SCENARIOS, partial(play, name), what=self.what, raise_rule="architectures")
        return partial(_check_and_report, name, run)


def _check_and_report(name: str, run: Callable[..., ContractReport], **options: Any) -> ContractReport:
    """Check a device, and keep what was found for doctor, engines and managers; a part of the check is not kept."""
    result = run(**options)
    if options.get("only") is None:
        built = result.results[0].passed
        ops = operators_of(name) if built else None
        DeviceReport(
            name, package_of(name), tuple(str(kind).removeprefix("torch.") for kind in ops.dtypes) if ops else (),
            operators.missing_operators(ops) if ops else {},
            {rule.rule: rule.message for rule in result.results if not rule.passed},
        ).write()  # fmt: skip
    return result


SUITE = _DeviceSuite("device", RULES, SCENARIOS)
