"""Loads transformers and LMDeploy in half of the time, for processes of ours that serve or compute.

Three things take the rest, and nothing here needs them: transformers loads torch's distributed tensors to see whether there
are any, and looks twice through the files of all its models; LMDeploy loads the tools that quantize a model, which load every
kind of model, and torch's compiler. All of it loads as ever once something asks for it.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

__all__ = ["load_lmdeploy", "only_engine"]

TENSORS = "torch.distributed.tensor"  # transformers takes nothing of it
# Files of which a class or a function is taken, and which are then loaded without their packages.
TRACING, QUANTIZING = "torch._dynamo._trace_wrapped_higher_order_op", "lmdeploy.lite.quantization.weight.quant_utils"


def load_lmdeploy() -> None:
    """Load transformers and LMDeploy, if they are not loaded yet."""
    import torch.distributed  # noqa: F401

    with _present(TENSORS, ModuleType):
        import transformers
    with _one_search():
        import transformers.models  # noqa: F401
    if TRACING not in sys.modules:  # it stays: torch's compiler knows the class, and takes it from here later
        sys.modules[TRACING] = _load_alone(TRACING)
    import lmdeploy
    from transformers import AutoTokenizer  # noqa: F401

    with _present(QUANTIZING, _load_alone):
        import lmdeploy.pytorch.nn.quant_utils  # noqa: F401


@contextmanager
def _present(name: str, make: Callable[[str], ModuleType]) -> Iterator[None]:
    """Let imports find a module in its place where it is not loaded yet."""
    if name in sys.modules:
        yield
        return
    sys.modules[name] = make(name)
    try:
        yield
    finally:
        del sys.modules[name]


@contextmanager
def _one_search() -> Iterator[None]:
    """Have the folder of all models named as it was when it was looked through: what was found is kept by name."""
    from transformers.utils import import_utils

    search = import_utils.define_import_structure

    def search_known(path: str | Path, prefix: str | None = None) -> Any:
        return search(Path(path).parent if Path(path).name == "__init__.py" else path, prefix)

    import_utils.define_import_structure = search_known
    try:
        yield
    finally:
        import_utils.define_import_structure = search


def _load_alone(name: str) -> ModuleType:
    """Return a module that is loaded without the packages that it is in."""
    first, *others = name.split(".")
    file = Path(sys.modules[first].__file__ or "").parent.joinpath(*others).with_suffix(".py")
    spec = spec_from_file_location(name, file)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def only_engine() -> None:
    """Leave out in this process what its engine does not need.

    Embeddings begin with any numbers: a model's weights replace the random ones, which take a second. LMDeploy's check of torch
    compares two tensors, for which torch would load its distributed ones.
    """
    import torch

    torch.nn.Embedding.reset_parameters = lambda self: None
    torch.testing._comparison._HAS_DTENSOR = False
