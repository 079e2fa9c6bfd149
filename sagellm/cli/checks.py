"""The questions that `sagellm doctor` asks, one function a subject. Each answers for itself whatever else is missing."""

import contextlib
import importlib.util
import json
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from sagellm.core.devices import GROUP as DEVICE_GROUP
from sagellm.core.devices import DeviceReport, is_brought, package_of
from sagellm.core.errors import ConfigError, SageError

if TYPE_CHECKING:
    from sagellm.accel.kernels.domestic import Found

OK, NOTE, MISSING = "ok", "note", "missing"
SETUP = "./apply_patches.sh"
NEW_PYTHON = f"python3.12 -m venv .venv && . .venv/bin/activate && {SETUP}"
PYTHONS = ((3, 10), (3, 13))
MIN_FREE_BYTES = 2 << 30  # torch, LMDeploy and a small model
MIN_DISK_BYTES = 1 << 30  # a converted default model, and some room
LIBRARIES = ("transformers", "tokenizers", "safetensors", "xgrammar", "fastapi", "uvicorn", "zmq", "openai")


class Finding(NamedTuple):
    """`state`: ok, note (works, worth knowing) or missing (the server cannot run). `command` mends it."""

    name: str
    state: str
    text: str
    command: str = ""


def python() -> list[Finding]:
    found = sys.version_info[:2]
    low, high = PYTHONS
    fits = low <= found <= high
    wheel = platform.system() == "Linux" and platform.machine() == "x86_64"
    version = f"Python {platform.python_version()}; LMDeploy's wheel is made for 3.{low[1]} to 3.{high[1]}"
    return [
        Finding("python", OK if fits else MISSING, version, "" if fits else NEW_PYTHON),
        Finding(
            "platform",
            OK if wheel else MISSING,
            f"{platform.system()} {platform.machine()}; LMDeploy's wheel is made for Linux x86_64",
        ),
    ]


def lmdeploy() -> list[Finding]:
    from sagellm.patching import status

    try:
        state = status()
    except SageError as error:
        return [Finding("lmdeploy", MISSING, str(error), SETUP)]
    version = Finding("lmdeploy", OK, f"LMDeploy {state.version} in {state.target}")
    if state.applied:
        return [version, Finding("patches", OK, f"all {len(state.patches)} patches are applied")]
    return [
        version,
        Finding("patches", MISSING, state.reason or f"the series is {state.state}", state.command or SETUP),
    ]


def torch() -> list[Finding]:
    absent = [name for name in LIBRARIES if importlib.util.find_spec(name) is None]
    libraries = (
        Finding("libraries", MISSING, f"not installed: {', '.join(absent)}", SETUP)
        if absent
        else Finding("libraries", OK, f"{', '.join(LIBRARIES)} are there")
    )
    if importlib.util.find_spec("torch") is None:
        return [libraries, Finding("torch", MISSING, "torch is not installed", SETUP)]
    import torch as pytorch

    backends = [name for name in ("mkldnn", "mkl", "openmp") if getattr(pytorch.backends, name).is_available()]
    text = f"torch {pytorch.__version__}; CPU kernels: {', '.join(backends) or 'plain'}"
    return [libraries, Finding("torch", OK, text), _gpus(pytorch)]


def _gpus(pytorch) -> Finding:
    if not pytorch.cuda.is_available():
        built = pytorch.version.cuda or pytorch.version.hip
        reason = f"torch is built for CUDA {built} and finds no GPU" if built else "torch is built without CUDA"
        driver = Path("/proc/driver/nvidia/version").exists()
        text = f"none: {reason}{', but there is an NVIDIA driver' if driver else ''}; the CPU device serves"
        return Finding("gpu", NOTE, text, f"{SETUP} --cuda" if driver and not built else "")
    names = [pytorch.cuda.get_device_name(index) for index in range(pytorch.cuda.device_count())]
    return Finding("gpu", OK, ", ".join(names))


def accelerators(
    root: Path = Path("/"), folders: Sequence[Path] | None = None, modules: Sequence[str] | None = None
) -> list[Finding]:  # fmt: skip
    """Name the accelerators of this machine, the back end of each, and what is missing. For the arguments see `probe`."""
    from sagellm.accel.kernels.domestic import VENDORS, probe

    found = probe(root, folders, modules)
    if not found:
        return [Finding("accelerators", NOTE, f"none found of {', '.join(vendor.title for vendor in VENDORS)}")]
    return [_accelerator(each) for each in found]


def _accelerator(found: "Found") -> Finding:
    vendor = found.vendor
    parts = [*map(str, found.nodes), *map(str, found.libraries.values()), *filter(None, [found.torch])]
    names = [vendor.lmdeploy_device] if vendor.lmdeploy_device else _devices_for(vendor.name)
    if vendor.lmdeploy_device:
        runs = f"LMDeploy runs it as device {names[0]}, {'by dlinfer' if vendor.needs_dlinfer else 'natively'}"
    elif names:
        runs = f"LMDeploy has no back end for it, a package brings device {', '.join(names)}"
    else:
        runs = f"LMDeploy has no back end for it; a package can bring a device, an entry point of the group {DEVICE_GROUP}"
    text = f"found {', '.join(parts)}; {runs}; collectives by {vendor.collective.upper()}"
    if not found.lacks:
        return Finding(vendor.title, OK if names else NOTE, text, f"sagellm serve --device {names[0]}" if names else "")
    missing = "; ".join(f"{lack.what} ({lack.how})" for lack in found.lacks)
    return Finding(vendor.title, NOTE, f"{text}. Missing: {missing}")


def _devices_for(vendor: str) -> list[str]:
    """Return the devices of installed packages that are for a vendor: their objects have it as `vendor`."""
    from sagellm.core.registry import load_offered, offered_names

    found = []
    for name in offered_names(DEVICE_GROUP):
        with contextlib.suppress(ConfigError):
            if getattr(load_offered(name, DEVICE_GROUP, "device", ConfigError), "vendor", "") == vendor:
                found.append(name)
    return found


def engines() -> list[Finding]:
    """The compiled engine needs CUDA's libraries; importing it in a process of its own cannot harm this one."""
    code = "import json; from sagellm.engines.lmdeploy.turbomind_build import probe; found = probe(); "
    code += "print(json.dumps([found.is_ready, found.text, found.next_step]))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    if run.returncode != 0:
        reason = (run.stderr.strip().splitlines() or [f"code {run.returncode}"])[-1]
        return [Finding("turbomind", NOTE, f"the compiled engine cannot be looked at ({reason}); the PyTorch engine serves")]
    is_ready, text, next_step = json.loads(run.stdout.splitlines()[-1])
    if is_ready:
        return [Finding("turbomind", OK, text, "sagellm serve --engine turbomind")]
    return [Finding("turbomind", NOTE, f"{text}; the PyTorch engine serves", next_step)]


def capabilities() -> list[Finding]:
    """Report what the PyTorch engine can do on the default device; this needs a patched LMDeploy."""
    from sagellm.engines.lmdeploy.capabilities import pytorch_capabilities
    from sagellm.engines.lmdeploy.sizing import resolve_device

    device = resolve_device("auto")
    found = pytorch_capabilities(device)
    parts = {
        "dtypes": found.dtypes, "tensor parallel": ("yes" if found.tensor_parallel else "no",),
        "quantization": found.quantization, "KV tiers": found.kv_tiers, "speculation": found.speculation, "roles": found.roles,
    }  # fmt: skip
    text = "; ".join(f"{name}: {', '.join(values) or 'none'}" for name, values in parts.items())
    lacking = "; ".join(f"{name}: {reason}" for name, reason in found.missing.items())
    rows = [Finding(f"pytorch on {device}", OK, text)]
    return [*rows, Finding(f"missing on {device}", NOTE, lacking)] if lacking else rows


def gpu_runs(folder: Path = Path(__file__).parents[2] / "benchmarks" / "results") -> list[Finding]:
    """Report the GPUs that have run the kit of `benchmarks/gpu`, from its committed reports alone."""
    findings = []
    for file in sorted(folder.glob("gpu_*.json")):
        run = json.loads(file.read_text())
        bad = sorted(name for name, part in run["parts"].items() if "error" in part or not all(part["checks"].values()))
        text = f"{run['device'].get('model', run['device']['name'])} on {run['date']}, revision {run['machine']['commit']}: "
        text += f"{len(run['parts']) - len(bad)} of {len(run['parts'])} parts passed"
        findings.append(Finding("GPU runs", NOTE if bad else OK, text + (f"; not {', '.join(bad)}" if bad else "")))
    return findings or [Finding("GPU runs", NOTE, "no GPU has run the kit of benchmarks/gpu so far")]


def collectives() -> list[Finding]:
    """The vendors' libraries of collectives. The backends of the project need none of them."""
    if importlib.util.find_spec("torch") is None:
        return []
    from sagellm.comm_backend.domestic.libraries import State, vendor_libraries

    return [
        Finding(row.library.name, OK if row.state is State.USABLE else NOTE, f"{row.library.vendor}: {row.state}; {row.reason}")
        for row in vendor_libraries()
    ]


def kv_channels() -> list[Finding]:
    """How KV blocks can be moved between engines. Those that need a library of others are not needed."""
    if importlib.util.find_spec("torch") is None:
        return []
    from sagellm.comm_backend.kv_transfer.registry import channel_names, find_channel

    missing = {name: find_channel(name).missing() for name in channel_names()}
    here = ", ".join(name for name, reason in missing.items() if not reason)
    lacking = [Finding(f"kv {name}", NOTE, reason) for name, reason in missing.items() if reason]
    return [Finding("kv channels", OK, f"usable: {here}"), *lacking]


def processor() -> list[Finding]:
    """Name the instruction set that the CPU device's kernels use."""
    from sagellm import _core
    from sagellm.engines.lmdeploy.cpu.runtime import usable_cores

    isa = _core.CpuKernels("bfloat16").isa
    text = f"{usable_cores()} cores; kernels of the CPU device: {isa}"
    return [Finding("cpu", NOTE if isa == "plain" else OK, text)]


def memory() -> list[Finding]:
    from sagellm.engines.lmdeploy.cpu.runtime import memory_bytes

    available, total = memory_bytes()
    text = f"{_gib(available)} free of {_gib(total)}"
    if available >= MIN_FREE_BYTES:
        return [Finding("memory", OK, text)]
    return [Finding("memory", NOTE, f"{text}; {_gib(MIN_FREE_BYTES)} are needed for a small model")]


def disk_and_models() -> list[Finding]:
    from sagellm.core.cached_folder import default_cache_dir
    from sagellm.demo_model.base import DemoRecipe, read_record
    from sagellm.models.local import default_state

    cache = default_cache_dir()
    existing = next(path for path in (cache, *cache.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    disk = Finding("disk", OK if free >= MIN_DISK_BYTES else NOTE, f"{_gib(free)} free for {cache}")
    text, command = default_state()
    demo = cache / DemoRecipe().folder_name()
    has_demo = read_record(demo) is not None
    return [
        disk,
        Finding("default model", NOTE if command else OK, text, command),
        Finding("demo model", OK, str(demo)) if has_demo else Finding("demo model", NOTE, "not built", "sagellm demo-model"),
    ]


def port(number: int) -> list[Finding]:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", number))
            probe.listen()  # binding alone succeeds beside another server that allows reuse
        except OSError as error:
            text = f"port {number} on 127.0.0.1: {error.strerror}"
            return [Finding("port", NOTE, text, f"sagellm serve --port {number % 65535 + 1}")]
    return [Finding("port", OK, f"port {number} on 127.0.0.1 is free")]


def extensions() -> list[Finding]:
    from sagellm.core.registry import known_plugins, offered_names

    devices = offered_names(DEVICE_GROUP)
    own = Finding("devices", OK, f"by entry point: {', '.join(devices)}")
    if "cpu" not in devices:
        own = Finding("devices", MISSING, "the CPU device is not registered; is sagellm installed?", SETUP)
    brought = [_brought(name) for name in devices if is_brought(name)]
    return [own, *brought, Finding("plug-ins", OK, f"by entry point: {', '.join(known_plugins()) or 'none'}")]


def _brought(name: str) -> Finding:
    """Describe a device that a package brings, by the package itself and by the report of its check."""
    from sagellm.core.registry import load_offered

    try:
        device = load_offered(name, DEVICE_GROUP, "device", ConfigError)
        available, total = device.memory()
        text = f"{package_of(name)}; type {device.torch_device} in torch; {_gib(available)} free of {_gib(total)}"
    except Exception as error:  # a package of others may raise anything
        return Finding(f"device {name}", NOTE, f"{package_of(name)} cannot be used: {error}")
    if why := DeviceReport.problem(name):
        return Finding(f"device {name}", NOTE, f"{text}; {why}", f"sagellm check device {name}")
    return Finding(f"device {name}", OK, f"{text}; it keeps to the contract", f"sagellm serve --device {name}")


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"
