"""Requests to a server, streamed, with the time of every piece."""

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import aiohttp

from sagellm.models import find_model


@dataclass
class Request:
    """`at_s`: when it is sent, after the start; None: as soon as there is a free place. `model`: as `--model` names it."""

    prompt: str
    max_tokens: int
    at_s: float | None = None
    model: str = "demo"
    ignore_eos: bool = False


@dataclass
class Reply:
    """`pieces_s`: when pieces of text came, in seconds of `time.perf_counter`. `error`: what was said in place of the rest of
    the answer; empty if it is whole."""

    text: str = ""
    finish: str = ""
    error: str = ""
    status: int = 0
    sent_s: float = 0.0
    end_s: float = 0.0
    pieces_s: list[float] = field(default_factory=list)


def ask_all(url: str, requests: Sequence[Request], places: int = 8, timeout_s: float = 120.0) -> list[Reply]:
    """Greedy completions of the server at `url`; at most `places` at a time of those that have no time of their own."""
    return asyncio.run(_ask_all(url, requests, places, timeout_s))


async def _ask_all(url: str, requests: Sequence[Request], places: int, timeout_s: float) -> list[Reply]:
    turn, start_s = asyncio.Semaphore(places), time.perf_counter()
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as http:

        async def one(request: Request) -> Reply:
            if request.at_s is None:
                async with turn:
                    return await ask(http, url, request)
            await asyncio.sleep(max(0.0, request.at_s - (time.perf_counter() - start_s)))
            return await ask(http, url, request)

        return list(await asyncio.gather(*map(one, requests)))


async def ask(http: aiohttp.ClientSession, url: str, request: Request) -> Reply:
    """Never raises for what a server does."""
    name = find_model(request.model).name
    body = {"model": name, "prompt": request.prompt, "max_tokens": request.max_tokens, "temperature": 0, "stream": True}
    body["ignore_eos"] = request.ignore_eos
    reply = Reply(sent_s=time.perf_counter())
    try:
        async with http.post(f"{url}/v1/completions", json=body | {"ignore_eos": True}) as answer:
            reply.status = answer.status
            if answer.status != 200:
                reply.error = (await answer.text())[:500]
                return reply
            async for line in answer.content:
                if line.startswith(b"data: "):
                    _take(reply, line[6:].strip())
        if not reply.error and not reply.finish:
            reply.error = "the stream ended before the answer did"
    except asyncio.TimeoutError:
        reply.error = "timeout"
    except aiohttp.ClientError as error:
        reply.error = f"{type(error).__name__}: {error}"
    finally:
        reply.end_s = time.perf_counter()
    return reply


def _take(reply: Reply, data: bytes) -> None:
    if data == b"[DONE]":
        return
    event = json.loads(data)
    if "error" in event:
        error = event["error"]
        reply.error = error["message"] if isinstance(error, dict) else str(error)
        return
    for choice in event.get("choices", ()):
        if text := choice.get("text"):
            reply.text += text
            reply.pieces_s.append(time.perf_counter())
        reply.finish = choice.get("finish_reason") or reply.finish
