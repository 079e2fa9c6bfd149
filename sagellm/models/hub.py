"""Fetches models by their hub id, as LMDeploy does: Hugging Face, or ModelScope by LMDeploy's own switch."""

import os
import re
from pathlib import Path

from sagellm.models.base import ModelError

__all__ = ["fetch", "is_hub_id", "split_revision"]

# Classes of errors that mean that the hub was not reached, in Python, in requests, in httpx and in the hub's library.
NETWORK = frozenset({"ConnectionError", "TimeoutError", "Timeout", "TransportError", "LocalEntryNotFoundError"})
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?")


def is_hub_id(text: str) -> bool:
    """Return whether `text` has the form org/name or org/name@revision."""
    return HUB_ID.fullmatch(text) is not None


def split_revision(hub_id: str) -> tuple[str, str | None]:
    """Split org/name@revision; without a revision it is None."""
    name, _, revision = hub_id.partition("@")
    return name, revision or None


def fetch(hub_id: str) -> Path:
    """Return the folder of a model in the hub's own cache; what is missing is downloaded, with progress bars.

    Raises:
        ModelError: the model cannot be had; says why and what to do.
    """
    name, revision = split_revision(hub_id)
    from lmdeploy.utils import get_model

    try:
        return Path(get_model(name, revision=revision))
    # Two hubs, their HTTP libraries and the disk: each has errors of its own.
    except Exception as error:
        raise ModelError(_reason(hub_id, error)) from None


def _reason(hub_id: str, error: Exception) -> str:
    hub = "ModelScope" if os.environ.get("LMDEPLOY_USE_MODELSCOPE", "").lower() == "true" else "Hugging Face"
    kinds = {kind.__name__ for kind in type(error).__mro__}
    if isinstance(error, ImportError):
        return f"{hub_id} cannot be fetched: {error}. Install it with pip, or give a folder or a .gguf file."
    if "RevisionNotFoundError" in kinds:
        return f"{hub_id}: {hub} has no such revision; leave out @REVISION for the newest."
    if "GatedRepoError" in kinds:
        return f"{hub_id} is a gated model on {hub}: accept its licence there, then run `hf auth login`."
    if "RepositoryNotFoundError" in kinds:
        return f"{hub_id} is neither a folder here nor a model on {hub}; check the name, or run `hf auth login`."
    if isinstance(error, OSError) and error.errno is not None and "RequestException" not in kinds:
        return f"{hub_id} cannot be stored: {error.strerror}. Free some space, or set HF_HOME to a folder with more."
    instead = "give --model a local folder or a .gguf file"
    # The hub's library raises "not in the cache" for whatever kept it from asking the hub.
    cause = error.__cause__ if "LocalEntryNotFoundError" in kinds and error.__cause__ else error
    if NETWORK & {kind.__name__ for kind in type(cause).__mro__}:
        return f"{hub_id} is not on this machine, and {hub} cannot be reached. Connect to the network, or {instead}."
    reason = " ".join(str(cause).split()).rstrip(".") or type(cause).__name__
    if "HFValidationError" in kinds:
        return f"{hub_id} is no id of {hub}: {reason}. Give org/name[@revision], or {instead}."
    return f"{hub_id} cannot be fetched from {hub}: {reason}. Try again later, or {instead}."
