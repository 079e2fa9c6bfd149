"""Finds out what LMDeploy's engines can do on this machine, and why they cannot do the rest."""

from contextlib import suppress

from sagellm.accel.speculative.registry import ENGINE_METHODS, speculator_names
from sagellm.comm_backend.kv_transfer.registry import channel_names, find_channel
from sagellm.core.devices import NO_REPORT, DeviceReport, is_brought
from sagellm.core.hooks import COMM_HOOKS, DECISIONS, NOTICES, Tier
from sagellm.engines.base import CapabilityDescriptor
from sagellm.patching import status

__all__ = ["pytorch_capabilities"]

ROLES = ("prefill", "decode", "hybrid")
QUANTIZED = {"awq": "LinearW4A16", "smooth_quant": "LinearW8A8", "fp8": "LinearBlockedF8"}


def pytorch_capabilities(device: str) -> CapabilityDescriptor:
    """Describe the PyTorch engine on `device` without starting it. The check's report speaks for one that a package brings."""
    missing: dict[str, str] = {}
    if is_brought(device) and (why := DeviceReport.problem(device)):
        missing[NO_REPORT] = why
    return CapabilityDescriptor(
        hooks=_hooks(missing),
        dtypes=_dtypes(device, missing),
        tensor_parallel=_has_collectives(device, missing),
        quantization=_quantization(device, missing),
        kv_tiers=tuple(tier.value for tier in Tier),
        speculation=_speculation(device, missing),
        roles=_roles(device, missing),
        missing=missing,
    )


def _hooks(missing: dict[str, str]) -> tuple[str, ...]:
    state = status()
    if state.applied:
        return (*DECISIONS, *NOTICES, *COMM_HOOKS)
    missing["hooks"] = state.reason or "LMDeploy is not patched; run ./apply_patches.sh"
    return ()


def _dtypes(device: str, missing: dict[str, str]) -> tuple[str, ...]:
    import torch

    if is_brought(device):
        report = DeviceReport.read(device)
        return report.dtypes if report is not None else ()
    if device == "cpu":
        missing["float16"] = "the CPU device computes in float32 or bfloat16"
        return ("float32", "bfloat16")
    if torch.cuda.is_available() and torch.cuda.is_bf16_supported():
        return ("float16", "bfloat16")
    missing["bfloat16"] = "this GPU has no bfloat16 arithmetic"
    return ("float16",)


def _has_collectives(device: str, missing: dict[str, str]) -> bool:
    import torch.distributed as dist

    name = "gloo" if device == "cpu" else "nccl"
    if is_brought(device):
        from lmdeploy import sage_device

        name = sage_device.find(device).ops_backend().ccl_backend()
    if dist.is_available() and dist.is_backend_available(name):
        return True
    missing["tensor parallel"] = f"this build of torch has no {name}"
    return False


def _quantization(device: str, missing: dict[str, str]) -> tuple[str, ...]:
    """List the quantised formats whose linear layers the device builds; LMDeploy's plain ones for no device do not count."""
    names = _operator_names(device)
    for name, operator in QUANTIZED.items():
        if operator not in names:
            missing[f"quantization {name}"] = f"the {device} device has no operator {operator}"
    found = tuple(name for name, operator in QUANTIZED.items() if operator in names)
    return (*found, "gptq") if device == "cpu" else found  # in AWQ's layers


def _operator_names(device: str) -> set[str]:
    if is_brought(device):
        report = DeviceReport.read(device)
        return set(QUANTIZED.values()) - set(report.missing) if report is not None else set()
    if device == "cpu":
        from sagellm.engines.lmdeploy.cpu import operators

        return set(operators.builders())
    from lmdeploy.pytorch.backends.base import OpType
    from lmdeploy.pytorch.backends.cuda.op_backend import CudaOpsBackend

    found = set()
    for name in QUANTIZED.values():
        with suppress(RuntimeError, NotImplementedError):  # raised for an operator that it does not have
            CudaOpsBackend.get_layer_impl_builder(OpType[name])
            found.add(name)
    return found


def _speculation(device: str, missing: dict[str, str]) -> tuple[str, ...]:
    if device != "cpu" and not is_brought(device):
        return tuple(speculator_names())
    missing.update({f"speculation {name}": "LMDeploy's own method needs a GPU" for name in ENGINE_METHODS})
    return tuple(name for name in speculator_names() if name not in ENGINE_METHODS)


def _roles(device: str, missing: dict[str, str]) -> tuple[str, ...]:
    channels = [find_channel(name) for name in channel_names()]
    if any(device in channel.device_types and not channel.missing() for channel in channels):
        return ROLES
    missing["roles"] = f"no KV channel for {device} works here; `sagellm doctor` names what each lacks"
    return ()
