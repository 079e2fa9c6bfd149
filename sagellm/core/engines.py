"""Engines for packages below them: what such a package may ask of an engine, and how it gets one.

The names of the modules are imported on request, so that no import points upwards.
"""

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from sagellm.core.config import PDHooks, SageConfig
from sagellm.core.running import Branches, Request

__all__ = ["Answer", "GroupEngine", "TextEngine", "answer_greedily", "check_engine", "open_engine", "write_alignment"]

ENGINE = "sagellm.engines.lmdeploy.engine:LMDeployEngine"
CHECK = "sagellm.engines.lmdeploy.engine:check_engine"
SAMPLING = "sagellm.engines.base:SamplingParams"
ALIGNMENT = "sagellm.evaluate.alignment:write_alignment"


class Answer(Protocol):
    """One answer, as `engines.base.Generation`. `token_s`: seconds from the call to each token."""

    token_ids: tuple[int, ...]
    token_s: tuple[float, ...]


class TextEngine(Protocol):
    """The part of `engines.base.BaseEngine` that packages below it use."""

    hooks: Any  # `SchedulerHooks`

    def generate(self, prompts: Sequence[Sequence[int]], params: Any = None) -> Sequence[Answer]: ...

    def start(self, prompt: Sequence[int], params: Any = None, keep: bool = False) -> Request: ...

    def fork(
        self, request: Request, prompts: Sequence[Sequence[int]], params: Any = None, num_tokens: int | None = None
    ) -> Branches: ...

    def prompt_logits(self, prompt: Sequence[int]) -> Any: ...

    def close(self) -> None: ...


class GroupEngine(TextEngine, Protocol):
    """An engine that exchanges keys and values with others. It was opened with `pd`."""

    group_address: str

    def connect_peer(self, engine_id: str, address: str) -> None: ...

    def progress(self) -> float: ...


def open_engine(config: SageConfig, pd: PDHooks | None = None) -> Any:
    """Load a `TextEngine`; with `pd` a `GroupEngine`. Raises as `LMDeployEngine`."""
    return _load(ENGINE)(config, pd=pd)


def check_engine(config: SageConfig) -> None:
    """Raise what `open_engine` would raise before it loads weights."""
    _load(CHECK)(config)


def answer_greedily(
    engine: TextEngine, prompts: Sequence[Sequence[int]], max_new_tokens: int, stop: tuple[int, ...] = ()
) -> Sequence[Answer]:
    """Continue token sequences greedily, up to a stop token."""
    params = _load(SAMPLING)(max_new_tokens=max_new_tokens, ignore_eos=not stop, stop_token_ids=stop)
    return engine.generate(prompts, params)


def write_alignment(folder: Path, source: Path) -> Any:
    """Write the alignment report of a quantized folder into it, and return it (`evaluate.alignment.AlignmentReport`)."""
    return _load(ALIGNMENT)(folder, source)


def _load(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)
