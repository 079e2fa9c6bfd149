"""An OpenAI endpoint that sends tokens at a fixed pace and computes nothing, to measure a gateway in front of it.

    python -m benchmarks.paced --port 9000 [--pace-ms 20] [--model paced]

It prints a line of JSON when it is ready. The tokens of an answer are the numbers from 0 on.
"""

import asyncio
import json
import os

import click
from aiohttp import web

MEDIA = {"Content-Type": "text/event-stream"}


def paced_app(model: str, pace_s: float) -> web.Application:
    """Return an application that answers completions and chats."""

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": model, "object": "model"}]})

    async def complete(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if "model" not in body:
            return web.json_response({"error": {"message": "model: a text is missing", "code": 400}}, status=400)
        num = body.get("max_tokens") or 16
        is_chat = request.path.endswith("chat/completions")
        if not body.get("stream"):
            await asyncio.sleep(num * pace_s)
            text = "".join(f"{number} " for number in range(num))
            part = {"message": {"role": "assistant", "content": text}} if is_chat else {"text": text}
            return web.json_response({"model": model, "choices": [part | {"index": 0, "finish_reason": "length"}]})
        answer = web.StreamResponse(headers=MEDIA)
        await answer.prepare(request)
        begun = asyncio.get_running_loop().time()
        for number in range(num):
            await asyncio.sleep(begun + number * pace_s - asyncio.get_running_loop().time())
            part = {"delta": {"content": f"{number} "}} if is_chat else {"text": f"{number} "}
            event = {"model": model, "choices": [part | {"index": 0, "finish_reason": None}]}
            await answer.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        await answer.write(b"data: [DONE]\n\n")
        return answer

    async def health(request: web.Request) -> web.Response:
        return web.Response()

    app = web.Application()
    app.add_routes([
        web.get("/health", health), web.get("/v1/models", models), web.post("/v1/completions", complete),
        web.post("/v1/chat/completions", complete),
    ])  # fmt: skip
    return app


@click.command()
@click.option("--port", type=int, required=True, help="Port on the loopback.")
@click.option("--pace-ms", type=float, default=20.0, show_default=True, help="Milliseconds between two tokens.")
@click.option("--model", default="paced", show_default=True, help="Name of the model.")
def main(port: int, pace_ms: float, model: str) -> None:
    """Serve until SIGINT or SIGTERM."""

    async def ready(app: web.Application) -> None:
        line = {"ready": True, "url": f"http://127.0.0.1:{port}/v1", "model": model, "pid": os.getpid()}
        asyncio.get_running_loop().call_later(0.05, lambda: print(json.dumps(line), flush=True))

    app = paced_app(model, pace_ms / 1000)
    app.on_startup.append(ready)
    web.run_app(app, host="127.0.0.1", port=port, print=None, access_log=None, shutdown_timeout=1)


if __name__ == "__main__":
    main()
