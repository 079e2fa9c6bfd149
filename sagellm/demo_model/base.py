"""The recipe of a demo model, and the record of a built one beside its weights."""

import hashlib
import json
import sys
from pathlib import Path
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from sagellm.core.errors import SageError

# Raised whenever the code changes what a recipe yields, so that an old cached folder is never taken for a new one.
FORMAT_VERSION = 1

RECORD_NAME = "demo_model.json"


class DemoModelError(SageError):
    """The demo model cannot be built, or the folder given for it cannot be used."""


class DemoRecipe(BaseModel):
    """Everything that decides the weights, together with the standard library's text.

    Two equal recipes on the same machine, Python and torch give the same bytes; the number of steps is fixed, so a
    slow machine takes longer and does not get a worse model.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    seed: int = 0
    vocab_size: int = Field(default=2048, ge=320, description="tokens, special ones included")
    hidden_size: int = Field(default=256, ge=16)
    intermediate_size: int = Field(default=704, ge=16)
    num_layers: int = Field(default=5, ge=1)
    num_heads: int = Field(default=4, ge=1)
    num_kv_heads: int = Field(default=2, ge=1)
    max_position_embeddings: int = Field(default=2048, ge=64)
    window_tokens: int = Field(default=256, ge=16, description="length of one training window")
    batch_size: int = Field(default=4, ge=1, description="windows in one step")
    steps: int = Field(default=440, ge=1)
    adamw_lr: float = Field(default=4e-3, gt=0)
    muon_lr: float = Field(default=2e-2, gt=0)
    max_files: int = Field(default=10_000, ge=1, description="source files read, in order of their paths")
    # Few enough to be seen some twenty times: a model of this size writes code that reads well only near what it has
    # learned by heart, and ten times as many functions leave it at noise.
    max_functions: int = Field(default=320, ge=8, description="chat examples taken from the standard library")
    max_plain: int = Field(default=30, ge=0, description="functions shown as plain source, without a question")

    def key(self) -> str:
        """12 hex digits that name this recipe under this Python (its standard library is the training text)."""
        text = f"{self.model_dump_json()} python{sys.version_info[0]}.{sys.version_info[1]}"
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def draft(self) -> "DemoRecipe":
        """The recipe of a draft model for this one: the same text and tokenizer, one layer, twice the steps.

        A pass of one layer is mostly calls: half the width would save a tenth of it and guess far less. A step of training
        takes a third of one of this model. With half as many steps, 75% of the tokens of a copy are right instead of 88%.
        """
        return self.model_copy(update={"num_layers": 1, "steps": 2 * self.steps})

    def folder_name(self) -> str:
        """Name of the cached folder.

        LMDeploy picks a built-in chat template when the path contains a model family's name; this one contains none,
        so that the template in `tokenizer_config.json` is used.
        """
        return f"demo-model-v{FORMAT_VERSION}-{self.key()}"


class TrainResult(NamedTuple):
    """Progress that the training loop reports."""

    parameters: int
    loss: float  # mean over the last tenth of the steps, nats a token


class DemoModelRecord(BaseModel):
    """Written last into a finished folder: a folder without it is not a demo model."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    key: str
    parameters: int
    loss: float
    seconds: float
    steps: int

    def write(self, folder: Path) -> None:
        """Store the record in `folder`."""
        (folder / RECORD_NAME).write_text(json.dumps(self.model_dump(), indent=2) + "\n", encoding="utf-8")


def read_record(folder: Path) -> DemoModelRecord | None:
    """The record of a finished folder, or None if it is missing or cannot be read."""
    try:
        return DemoModelRecord.model_validate_json((folder / RECORD_NAME).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ValidationError):
        return None
