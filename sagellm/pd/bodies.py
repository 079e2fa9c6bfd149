"""Bodies of requests: read and checked as far as the proxy must, and what it adds for the engines of a split."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

__all__ = ["BadBody", "Body", "error_body", "read_body", "relayed_headers"]

MAX_BODY_BYTES = 8 << 20  # as the engines' servers
TCP = 1  # lmdeploy's MigrationProtocol.TCP
# The proxy adds and signs these: a client that could send them would have engines read each other's blocks.
OURS = ("migration_request", "with_cache", "preserve_cache")
# These concern the answer's form alone, or are set anew. Fields that decide which token is drawn stay: the decoding
# engine may take the one that the prefill engine draws (`Held.first_token`).
NOT_FOR_PREFILL = ("stream_options", "logprobs", "top_logprobs", "max_completion_tokens")
NOT_RELAYED = {
    "host", "content-length", "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer",
    "transfer-encoding", "upgrade", "accept-encoding", "expect", "x-sage-signature",
}  # fmt: skip


class BadBody(Exception):
    """A request that no engine is asked about; `status` is the HTTP status."""

    def __init__(self, words: str, status: int = 400) -> None:
        super().__init__(words)
        self.status = status


@dataclass(frozen=True, slots=True)
class Body:
    """`content`: as the client sent it. `raw`: its JSON."""

    content: bytes
    raw: dict[str, Any]

    @property
    def model(self) -> str | None:
        model = self.raw.get("model")
        return model if isinstance(model, str) else None

    @property
    def stream(self) -> bool:
        return self.raw.get("stream") is True

    @property
    def max_tokens(self) -> int | None:
        found = [self.raw.get(name) for name in ("max_completion_tokens", "max_tokens")]
        return next((number for number in found if type(number) is int and number > 0), None)

    @property
    def num_prompts(self) -> int:
        prompt = self.raw.get("prompt")
        is_several = isinstance(prompt, list) and not all(isinstance(item, int) for item in prompt)
        return len(prompt) if is_several else 1

    @property
    def num_answers(self) -> int:
        found = [self.raw.get(name) for name in ("n", "best_of")]
        return max([1, *(number for number in found if type(number) is int)])

    def for_decode(self, prefill_url: str, transfer_id: int) -> bytes:
        """For the engine that decodes, which fetches the prompt's keys and values under this id."""
        return json.dumps(self.raw | {"migration_request": _migration(prefill_url, transfer_id)}).encode()

    def for_prefill(self, decode_url: str, transfer_id: int) -> bytes:
        """For the prefill engine, which computes the prompt and keeps its keys and values under this id."""
        kept = {name: value for name, value in self.raw.items() if name not in NOT_FOR_PREFILL}
        kept.pop("min_tokens", None)
        # The first token may be drawn there, and then not one that ends the answer.
        if self.raw.get("min_new_tokens") or self.raw.get("min_tokens"):
            kept["min_new_tokens"] = 1
        added = {
            "max_tokens": 1, "stream": False, "with_cache": True, "preserve_cache": True,
            "migration_request": _migration(decode_url, transfer_id),
        }  # fmt: skip
        return json.dumps(kept | added).encode()


async def read_body(receive: Any) -> Body | None:
    """None where the client has left.

    Raises:
        BadBody: too large, no JSON object, or with what only the proxy may say.
    """
    parts, size = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > MAX_BODY_BYTES:
            raise BadBody(f"the body is larger than {MAX_BODY_BYTES} bytes.", 413)
        if not message.get("more_body"):
            break
    content = b"".join(parts)
    try:
        raw = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise BadBody(f"the body is not JSON: {error}.") from None
    if not isinstance(raw, dict):
        raise BadBody(f"the body is a JSON {type(raw).__name__}; send an object.")
    for name in OURS:
        if raw.get(name):
            raise BadBody(f"{name} is said by the proxy alone; leave it out.")
    return Body(content, raw)


def relayed_headers(headers: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    """Those of a client that engines get; `headers` as ASGI gives them."""
    found: dict[str, str] = {}
    for name, value in headers:
        key = name.decode("latin-1").lower()
        if key not in NOT_RELAYED:
            found[key] = value.decode("latin-1")
    return found


def error_body(words: str, status: int, **known: Any) -> bytes:
    """As the engines' servers word an error: with the fields at the top and in `error`, which clients differ in reading.

    `known`: type, param and code, where an engine gave them.
    """
    kind = "invalid_request_error" if status < 500 else "server_error"
    error = {"message": words, "type": kind, "param": None, "code": status} | known
    return json.dumps({"object": "error", **error, "error": error}).encode()


def _migration(peer_url: str, transfer_id: int) -> dict[str, Any]:
    """A `MigrationRequest` of LMDeploy's; the blocks are told over the control connection."""
    return {
        "protocol": TCP, "remote_engine_id": peer_url, "remote_session_id": transfer_id, "remote_token_id": 0,
        "remote_block_ids": [],
    }  # fmt: skip
