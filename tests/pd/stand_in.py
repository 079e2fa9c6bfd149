"""A process that speaks an engine's protocol, HTTP and control connections, without a model: `python -m tests.pd.stand_in`.

It takes the flags of `sagellm serve` that the proxy's side of a group needs. Its tokens depend on the prompt and their number
alone, so that any engine gives the same answer. A request may ask for trouble in the field `stand_in`: {"die_after": n} ends
the process after n tokens; "status": answer with it; "delay_s": before each token; "hang_s": before the prompt; "error_after":
end the stream with an error event after n tokens; "on": the roles or URLs that this is meant for, all by default.
"""

import argparse
import asyncio
import hashlib
import json
import os
import secrets
import sys
import time
from pathlib import Path

import aiohttp
import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from sagellm.comm_backend.control import ControlServer, check_request, connect, read_key, sign_request
from sagellm.comm_backend.group_messages import (
    Connect,
    Done,
    EngineFacts,
    Fetch,
    Held,
    Hello,
    Load,
    PrefixChange,
    Release,
    Released,
    StepCost,
    Subscribe,
)
from sagellm.control_plane.base import totals
from sagellm.core.errors import PeerError, SageError
from sagellm.pd.tokens import PromptTokens, prefix_keys

BLOCK = 16
TIMEOUT_S = 5.0


def tokens_of(prompt: str, num: int) -> list[str]:
    return [hashlib.sha256(f"{prompt}:{place}".encode()).hexdigest()[:4] for place in range(num)]


class StandIn:
    def __init__(self, flags):
        self.flags, self.key = flags, read_key(flags.pd_key_file)
        self.url = f"http://{flags.host}:{flags.port}"
        self.model = flags.model_name or Path(flags.model).name
        self.tokens = PromptTokens(Path(flags.model)) if flags.tokenizer else None
        self.held: dict[int, asyncio.Future] = {}
        self.sources: dict[str, object] = {}
        self.listeners: list = []
        self.num_requests = 0
        self.cached: set[int] = set()
        self.sequence = 0
        self.seen: list[dict] = []
        self.costs: list[StepCost] = []
        self.running = 0
        self.released: list[int] = []
        weights = f"random-{secrets.token_hex(4)}" if flags.weights == "random" else flags.weights
        self.facts = EngineFacts(
            engine_id=self.url, instance=secrets.token_hex(8), role=flags.role, model=self.model, weights=weights,
            channel="none", endpoints=(), block_size=BLOCK, num_blocks=1000, token_bytes=1024, timeout_s=TIMEOUT_S,
        )  # fmt: skip
        self.control = ControlServer(self.key, {
            Hello: self.hello, Subscribe: self.subscribe, Connect: self.connect, Fetch: self.fetch, Release: self.release
        })  # fmt: skip

    # control connections
    async def hello(self, connection, message):
        connection.peer = message.engine_id
        if message.facts is not None and message.facts.weights != self.facts.weights:
            raise PeerError(f"{message.engine_id} has weights {message.facts.weights}, not {self.facts.weights}.")
        return self.facts

    async def subscribe(self, connection, message):
        self.listeners.append(connection)
        return PrefixChange(after=self.sequence, sequence=self.sequence, stored=tuple(self.cached), is_all=True)

    async def connect(self, _, message):
        peer = await connect(message.address, self.key)
        await peer.call(Hello(engine_id=self.url, facts=self.facts), 5, EngineFacts)
        old, self.sources[message.engine_id] = self.sources.get(message.engine_id), peer
        if old is not None:
            await old.close()
        return Done()

    async def fetch(self, _, message):
        try:
            num = await asyncio.wait_for(asyncio.shield(self.transfer(message.transfer_id)), message.timeout_s)
        except asyncio.TimeoutError:
            raise PeerError(f"transfer {message.transfer_id}: not computed within {message.timeout_s} s.") from None
        if num is None:
            raise PeerError(f"transfer {message.transfer_id} was given up.")
        blocks = tuple(range(-(-num // BLOCK)))
        return Held(transfer_id=message.transfer_id, blocks=blocks, num_tokens=num, computed_at=time.time(), tokens="")

    async def release(self, _, message):
        self.released.append(message.transfer_id)
        future = self.held.pop(message.transfer_id, None)
        if future is None:  # who asks for it after this is told so, and does not wait
            self.transfer(message.transfer_id).set_result(None)
            return Released(was_held=False)
        if future.done():
            return Released(was_held=future.result() is not None)
        future.set_result(None)
        return Released(was_held=False)

    def transfer(self, transfer_id):
        """The number of tokens whose keys and values are there, once they are; None where they never will be."""
        return self.held.setdefault(transfer_id, asyncio.get_running_loop().create_future())

    async def tell(self, event):
        for listener in list(self.listeners):
            try:
                await listener.tell(event)
            except SageError:
                self.listeners.remove(listener)

    # HTTP
    async def info(self, request):
        check_request(self.key, "GET", "/sage/pd/info", b"", request.headers)
        return JSONResponse({"engine_id": self.url, "role": self.flags.role, "control": self.address, "model": self.model})

    async def completion(self, request):
        content = await request.body()
        raw = json.loads(content)
        given = {"path": request.url.path, "body": raw, "headers": dict(request.headers)}
        migration = raw.get("migration_request")
        if migration or self.flags.role == "prefill":
            check_request(self.key, "POST", request.url.path, content, request.headers)
        self.seen.append(given)
        trouble = raw.get("stand_in") or {}
        if not (not trouble.get("on") or self.flags.role in trouble["on"] or self.url in trouble["on"]):
            trouble = {}
        if "status" in trouble:
            return JSONResponse({"error": {"message": "asked for"}}, trouble["status"])
        prompt = raw["prompt"] if "prompt" in raw else raw["messages"][-1]["content"]
        self.running += 1
        self.num_requests += 1
        try:
            if self.flags.role == "prefill":
                await self.compute(raw, prompt, trouble)
                if not (future := self.transfer(migration["remote_session_id"])).done():
                    future.set_result(len(prompt))
                return JSONResponse({"choices": [{"text": "x"}]})
            loaded = await self.load(migration) if migration else False
            if not loaded:
                await self.compute(raw, prompt, trouble)
        finally:
            self.running -= 1
        words = self.generate(request, tokens_of(prompt, raw.get("max_tokens", 8)), trouble, loaded)
        if raw.get("stream"):
            return StreamingResponse(words, media_type="text/event-stream")
        texts = [json.loads(word[6:])["choices"][0]["text"] async for word in words if b"[DONE]" not in word]
        return JSONResponse({"model": self.model, "loaded": loaded, "choices": [{"text": "".join(texts)}]})

    async def load(self, migration):
        peer = self.sources.get(migration["remote_engine_id"])
        name = migration["remote_session_id"]
        try:
            held = await peer.call(Fetch(transfer_id=name, timeout_s=TIMEOUT_S), TIMEOUT_S + 1, Held)
            seconds = 1e-4 + 1e-6 * held.num_tokens
            self.costs.append(StepCost(kind="transfer", num_bytes=1024 * held.num_tokens, seconds=seconds))
            return (await peer.call(Release(transfer_id=name), 5, Released)).was_held
        except SageError:
            return False

    async def compute(self, raw, prompt, trouble):
        if "hang_s" in trouble:
            await asyncio.sleep(trouble["hang_s"])
        if trouble.get("die_after") == 0:
            os._exit(9)
        self.costs.append(StepCost(kind="prefill", num_tokens=len(prompt), num_requests=1, seconds=1e-3 * len(prompt) + 0.01))
        if self.tokens is not None:
            path = "/v1/completions" if "prompt" in raw else "/v1/chat/completions"
            found = self.tokens.of(path, {name: raw[name] for name in ("model", "prompt", "messages") if name in raw})
            new = set(prefix_keys(found[0], BLOCK)) - self.cached
            self.cached |= new
            self.sequence += 1
            await self.tell(PrefixChange(after=self.sequence - 1, sequence=self.sequence, stored=tuple(new)))
        costs, self.costs = tuple(self.costs[-64:]), []
        await self.tell(Load(num_running=self.running, num_waiting=0, waiting_tokens=0, free_blocks=900, costs=costs))

    async def generate(self, request, words, trouble, loaded):
        number = 0
        try:
            for number, word in enumerate(words):
                if trouble.get("die_after") == number and number:
                    os._exit(9)
                if trouble.get("error_after") == number:
                    yield b'data: {"error": {"message": "the engine has stopped", "code": 503}}\n\ndata: [DONE]\n\n'
                    return
                if "delay_s" in trouble:
                    await asyncio.sleep(trouble["delay_s"])
                yield b"data: " + json.dumps({"loaded": loaded, "choices": [{"text": word}]}).encode() + b"\n\n"
            yield b"data: [DONE]\n\n"
        except (asyncio.CancelledError, GeneratorExit):  # the client has left
            self.seen.append({"cancelled": number})
            raise

    async def metrics(self, _):
        """Figures of a load, as a server's page has them. Half of the pool is in use."""
        figures = {"lmdeploy:num_requests_running": self.running, "sagellm_kv_utilization": 0.5}
        figures |= dict.fromkeys(totals("lmdeploy").values(), self.num_requests)
        return Response("".join(f"{name} {value}\n" for name, value in figures.items()))

    async def register(self):
        async with aiohttp.ClientSession() as http:
            while True:
                try:
                    headers = sign_request(self.key, "GET", "/nodes/status", b"")
                    async with http.get(f"{self.flags.proxy_url}/nodes/status", headers=headers) as answer:
                        known = await answer.json()
                    if self.url not in known:
                        body = json.dumps({"url": self.url, "status": {"models": [self.model], "role": 1}}).encode()
                        headers = sign_request(self.key, "POST", "/nodes/add", body) | {"content-type": "application/json"}
                        async with http.post(f"{self.flags.proxy_url}/nodes/add", data=body, headers=headers) as answer:
                            if answer.status != 200:
                                print(f"not taken: {await answer.text()}", file=sys.stderr, flush=True)
                except (aiohttp.ClientError, OSError, ValueError):
                    pass  # no proxy yet, or none any more
                await asyncio.sleep(0.2)

    async def run(self):
        if self.flags.fail_with:
            print(f"error: {self.flags.fail_with}", file=sys.stderr, flush=True)
            os._exit(2)
        self.address = await self.control.start(self.flags.host, 0)
        routes = [
            Route("/sage/pd/info", self.info), Route("/health", lambda _: Response()), Route("/metrics", self.metrics),
            Route("/seen", lambda _: JSONResponse(self.seen)), Route("/released", lambda _: JSONResponse(self.released)),
            Route("/v1/completions", self.completion, methods=["POST"]),
            Route("/v1/chat/completions", self.completion, methods=["POST"]),
        ]  # fmt: skip
        config = uvicorn.Config(Starlette(routes=routes), host=self.flags.host, port=self.flags.port, log_level="warning",
                                timeout_graceful_shutdown=5)  # fmt: skip
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        registering = asyncio.create_task(self.register())
        print(json.dumps({"ready": True, "url": f"{self.url}/v1", "model": self.model, "pid": os.getpid()}), flush=True)
        await serving
        registering.cancel()
        await self.control.close()


def main():
    parser = argparse.ArgumentParser()
    for name in ("role", "proxy-url", "pd-key-file", "host", "model", "model-name", "fail-with", "threads", "drain-timeout-s"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--port", type=int)
    parser.add_argument("--weights", default="w")
    parser.add_argument("--api-key", action="append")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--tokenizer", action="store_true")
    asyncio.run(StandIn(parser.parse_args()).run())


if __name__ == "__main__":
    main()
