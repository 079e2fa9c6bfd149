"""Proof that an endpoint was made with the group's key, for channels whose library has no keys."""

import hashlib
import hmac
import json
from collections.abc import Mapping
from typing import Any

from sagellm.comm_backend.kv_transfer.layout import KVLayout
from sagellm.core.errors import TransferError

__all__ = ["check_proof", "proof_of"]


def proof_of(key: bytes, channel: str, layout: KVLayout, address: Mapping[str, Any]) -> str:
    """`address`: as JSON, without the proof."""
    text = json.dumps([channel, layout.model_dump(mode="json"), dict(address)], sort_keys=True)
    return hmac.new(key, text.encode(), hashlib.sha256).hexdigest()


def check_proof(key: bytes, channel: str, layout: KVLayout, address: Mapping[str, Any]) -> None:
    """`address`: with the proof. Raises TransferError: it was made with another key."""
    rest = {name: value for name, value in address.items() if name != "proof"}
    if not hmac.compare_digest(str(address.get("proof", "")), proof_of(key, channel, layout, rest)):
        raise TransferError("its endpoint was made with another key than ours; all engines of a group have the same.")
