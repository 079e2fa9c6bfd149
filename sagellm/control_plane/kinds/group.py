"""A prefill/decode group, `sagellm pd up`, as one engine: its proxy is the server."""

import sys
from collections.abc import Sequence
from typing import Any

from sagellm.control_plane.child_engine import ChildEngine

__all__ = ["PDGroup"]


class PDGroup(ChildEngine):
    """Prompts on some engines, decoding on others.

    Args:
        model: name, folder, .gguf file or hub id; None: the default model.
        prefill, decode, hybrid: how many engines of each role.
        policy: routing policy of the group.
        flags: flags of `sagellm serve` for each engine.
    """

    name = "group"

    def __init__(
        self, model: str | None = None, prefill: int = 1, decode: int = 1, hybrid: int = 0, policy: str = "pd",
        flags: Sequence[str] = (),
    ) -> None:  # fmt: skip
        self._command = [sys.executable, "-m", "sagellm.pd", "up", "--json", "--prefill", str(prefill), "--decode",
                         str(decode), "--hybrid", str(hybrid), "--policy", policy]  # fmt: skip
        if model is not None:
            self._command += ["--model", str(model)]
        self._flags = list(map(str, flags))

    def command(self, port: int) -> list[str]:
        return [*self._command, "--port", str(port), "--", *self._flags]

    def on_ready(self, line: dict[str, Any]) -> None:
        self.model = line.get("model", self.model)
