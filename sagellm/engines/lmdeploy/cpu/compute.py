"""The type in which products with bfloat16 weights are computed: chosen by measuring once on a machine, or by the user."""

import json
import time
from contextlib import suppress
from pathlib import Path

import torch

from sagellm import __version__, _core
from sagellm.core.cached_folder import write_whole
from sagellm.core.errors import ConfigError

__all__ = ["CACHE_NAME", "INSTRUCTION_SETS", "choose_isa"]

CACHE_NAME = "compute.json"
INSTRUCTION_SETS = ("amx", "avx512_bf16", "avx512", "avx2", "plain")  # the best first
OUTPUTS, INPUTS, ROWS, REPEATS = 1536, 576, (1, 64), 5


def choose_isa(compute: str, dtype: torch.dtype, cache_dir: Path) -> str:
    """Return the instruction set whose kernels multiply in the type `compute`.

    Args:
        compute: float32, bfloat16, or auto, the quicker one for weights of `dtype`. It never lowers the precision of float32.
            int8: weights and inputs are rounded to 8 bits. auto never takes it.
        cache_dir: folder of the file that remembers what was measured. A file that cannot be read or written costs a new
            measurement.

    Raises:
        ConfigError: this processor, or weights of `dtype`, have no products of this type.
    """
    name = str(dtype).removeprefix("torch.")
    best: dict[str, str] = {}  # by type of the products
    for isa in INSTRUCTION_SETS:
        with suppress(ValueError):
            kernels = _core.CpuKernels(name, isa)
            best.setdefault(kernels.inputs, isa)
            if kernels.has_8_bits and dtype != torch.float32:
                best.setdefault("int8", isa)
    if compute != "auto":
        if compute not in best:
            is_wide = dtype == torch.float32
            reason = "weights of float32 keep its precision" if is_wide else "this processor has no instruction for it"
            raise ConfigError(f"compute {compute}: {reason}. Use {', '.join(sorted(best))} or auto.")
        return best[compute]
    best.pop("int8", None)
    if len(best) == 1:
        return next(iter(best.values()))
    key, file = f"{_processor()}, {name}, sagellm {__version__}: {' or '.join(best.values())}", cache_dir / CACHE_NAME
    known = _read(file)
    if known.get(key) not in best.values():
        known[key] = min(best.values(), key=lambda isa: _seconds(name, dtype, isa))
        _write(file, known)
    return known[key]


def _seconds(name: str, dtype: torch.dtype, isa: str) -> float:
    """Time of a product of one row and one of many, with one thread; the best of a few."""
    kernels, team = _core.CpuKernels(name, isa), _core.CpuTeam(1)
    weight = torch.ones(OUTPUTS, INPUTS, dtype=dtype)
    packed = torch.empty(kernels.packed_bytes(OUTPUTS, INPUTS), dtype=torch.uint8)
    kernels.pack(weight.data_ptr(), INPUTS, OUTPUTS, INPUTS, packed.data_ptr())
    matrix = {"weight": packed.data_ptr(), "bias": 0, "outputs": OUTPUTS, "inputs": INPUTS}
    x, out = torch.ones(max(ROWS), INPUTS, dtype=dtype), torch.empty(max(ROWS), OUTPUTS, dtype=dtype)
    total = 0.0
    for rows in ROWS:
        best = float("inf")
        for _ in range(REPEATS):
            begin_s = time.perf_counter()
            kernels.multiply(team, matrix, "", x.data_ptr(), rows, out.data_ptr(), OUTPUTS, False)
            best = min(best, time.perf_counter() - begin_s)
        total += best
    return total


def _processor() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return "processor"


def _read(file: Path) -> dict[str, str]:
    try:
        known = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


def _write(file: Path, known: dict[str, str]) -> None:
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, json.dumps(known, indent=1) + "\n")
