"""Questions to an OpenAI server: does it live, its models and routes, how it tokenizes, its load."""

import asyncio
import contextlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from sagellm.core.errors import ConfigError, EngineError

__all__ = ["ROUTES", "EngineFacts", "base_url", "facts", "health", "load"]

ROUTES = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings")
TIMEOUT = aiohttp.ClientTimeout(total=10.0)
INFO = "/sagellm/info"
NO_ROUTE = (404, 405, 501)
# Its tokens differ between vocabularies. Byte tokens of digits and signs do not.
SAMPLE = "Ünïcode and CamelCase, 12345 tokens;\n\tfor each in range(10): naïveté 东京"
# Route of a tokenizer -> its body, and the field of the answer. The first is LMDeploy's, the others vLLM's and llama.cpp's.
TOKENIZERS = (
    ("/v1/encode", {"input": SAMPLE, "do_preprocess": False, "add_bos": False}, "input_ids"),
    ("/tokenize", {"prompt": SAMPLE, "content": SAMPLE, "add_special_tokens": False}, "tokens"),
)


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """Answers of a server about itself.

    Attributes:
        models: names of its models.
        routes: those of `ROUTES` that it has.
        tokens: ids of a sample text; None where it does not tokenize on request.
        device: type of its device; empty where it does not say.
        capabilities: as a `CapabilityDescriptor` of `sagellm.engines`; empty where it does not say.
    """

    models: tuple[str, ...]
    routes: tuple[str, ...]
    tokens: tuple[int, ...] | None = None
    device: str = ""
    capabilities: Mapping[str, Any] = field(default_factory=dict)


def base_url(url: str) -> str:
    """Return the URL without /v1. Raises ConfigError: it is not http://host:port."""
    if not re.fullmatch(r"https?://[^/\s?#]+(/[^\s?#]*)?", url):
        raise ConfigError(f"{url!r} is no URL of a server; give http://host:port or http://host:port/v1.")
    return url.rstrip("/").removesuffix("/v1")


async def health(http: aiohttp.ClientSession, url: str, key: str | None) -> str:
    """Return why the server does not serve, or nothing. A server without /health is asked for its models.

    Raises:
        asyncio.TimeoutError: it does not answer.
    """
    for path in ("/health", "/v1/models"):
        try:
            async with http.get(url + path, headers=key_header(key), timeout=TIMEOUT) as answer:
                if answer.status == 200:
                    return ""
                if answer.status not in NO_ROUTE:
                    return f"{path} answers {answer.status}: {(await answer.text())[:200]}"
        except asyncio.TimeoutError:
            raise
        except (aiohttp.ClientError, OSError) as error:
            return f"it cannot be reached: {_reason(error)}"
    return "it has neither /health nor /v1/models"


async def facts(http: aiohttp.ClientSession, url: str, key: str | None) -> EngineFacts:
    """Ask a server for its models and routes.

    Raises:
        EngineError: it does not answer.
        ConfigError: it is no OpenAI server, or does not take the key.
    """
    status, said = await _ask(http, "GET", url, "/v1/models", key)
    if status in (401, 403):
        raise ConfigError(f"{url} does not take the key ({status}); give the engine's api_key.")
    try:
        models = tuple(dict.fromkeys(str(each["id"]) for each in json.loads(said)["data"]))
    except (ValueError, TypeError, KeyError):
        raise ConfigError(f"{url} is no OpenAI server: /v1/models answers {status}, {said[:100]!r}.") from None
    if status != 200 or not models:
        raise ConfigError(f"{url} is no OpenAI server: /v1/models answers {status} and names no model.")
    routes = []
    for path in ROUTES:
        status, _ = await _ask(http, "POST", url, path, key, {})  # a body that every server rejects
        if status in (401, 403):
            raise ConfigError(f"{url} does not take the key ({status}); give the engine's api_key.")
        if status not in NO_ROUTE:
            routes.append(path)
    if not routes:
        raise ConfigError(f"{url} is no OpenAI server: it has none of {', '.join(ROUTES)}.")
    device, capabilities = await abilities(http, url, key)
    return EngineFacts(models, tuple(routes), await tokens(http, url, key, models[0]), device, capabilities)


async def load(http: aiohttp.ClientSession, url: str, names: Mapping[str, str]) -> dict[str, float]:
    """Read figures of a server's /metrics: our name -> value. It has none of them where the page lacks its sample."""
    found: dict[str, float] = {}
    with contextlib.suppress(aiohttp.ClientError, asyncio.TimeoutError, OSError, ValueError):
        async with http.get(url + "/metrics", timeout=TIMEOUT) as answer:
            text = await answer.text() if answer.status == 200 and names else ""
        for name, sample in names.items():
            values = re.findall(rf"^{re.escape(sample)}(?:{{[^}}]*}})? (\S+)", text, re.MULTILINE)
            if values:
                found[name] = sum(map(float, values))
    return found


async def abilities(http: aiohttp.ClientSession, url: str, key: str | None) -> tuple[str, dict[str, Any]]:
    """Device and capabilities, of a server of this project."""
    status, said = await _ask(http, "GET", url, INFO, key)
    with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError):
        if status == 200:
            found = json.loads(said)
            return str(found["device"]), dict(found.get("capabilities", {}))
    return "", {}


async def tokens(http: aiohttp.ClientSession, url: str, key: str | None, model: str) -> tuple[int, ...] | None:
    for path, body, name in TOKENIZERS:
        named = {} if path.startswith("/v1/") else {"model": model}  # LMDeploy's takes no model
        status, said = await _ask(http, "POST", url, path, key, body | named)
        if status == 200:
            with contextlib.suppress(ValueError, TypeError, KeyError):
                return tuple(map(int, json.loads(said)[name]))
    return None


async def _ask(
    http: aiohttp.ClientSession, method: str, url: str, path: str, key: str | None, body: Any = None
) -> tuple[int, str]:  # fmt: skip
    """Raises EngineError: it does not answer."""
    try:
        async with http.request(method, url + path, json=body, headers=key_header(key), timeout=TIMEOUT) as answer:
            return answer.status, await answer.text(errors="replace")
    except asyncio.TimeoutError:
        raise EngineError(f"{url} does not answer within {TIMEOUT.total:g} s.") from None
    except (aiohttp.ClientError, OSError) as error:
        raise EngineError(f"{url} cannot be reached: {_reason(error)}.") from None


def key_header(key: str | None) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"} if key else {}


def _reason(error: BaseException) -> str:
    return str(getattr(getattr(error, "os_error", None), "strerror", None) or error or type(error).__name__)
