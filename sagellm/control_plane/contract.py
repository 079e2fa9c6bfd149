"""Contracts of the control plane: `sagellm check engine-kind NAME`, `check router NAME` and `check scaling NAME`."""

import asyncio
import contextlib
import json
import random
import secrets
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp

from sagellm.control_plane.base import (
    CachedPrompt,
    Candidates,
    EngineKind,
    EngineView,
    PoolView,
    Router,
    RouteRequest,
    ScalingPolicy,
)
from sagellm.control_plane.child_engine import HOST
from sagellm.control_plane.config import ManagerConfig
from sagellm.control_plane.fleet import Fleet, check_choice
from sagellm.control_plane.gateway import Gateway
from sagellm.control_plane.metrics import GatewayMetrics
from sagellm.control_plane.probe import ROUTES, key_header
from sagellm.control_plane.relay import as_openai
from sagellm.control_plane.routers.least_load import LeastLoad
from sagellm.control_plane.scaling import check_decision
from sagellm.core.contract import Broke, Played, Report, Scenario, Suite
from sagellm.core.errors import SageError
from sagellm.core.ports import listen
from sagellm.core.tasks import within

__all__ = ["ENGINE_SUITE", "ROUTER_SUITE", "SCALING_SUITE"]

ROUTER_RULES = {
    "builds": "has a name and can be built",
    "raises_nothing": "raises at no request for which there is an engine",
    "answers": "answers with a RouteChoice among the engines that it was offered, and a reason",
    "forgets": "goes on after an engine has ended",
}
SCALING_RULES = {
    "builds": "has a name and can be built",
    "raises_nothing": "raises at no view, also where nothing was measured",
    "answers": "answers with a ScalingDecision: a whole number from 0 on, and a reason",
    "repeats": "answers the same views in the same way, built anew from its recorded options",
}
ENGINE_RULES = {
    "builds": "can be built with these options, and starts nothing then",
    "raises_nothing": "raises nothing but SageError",
    "serves": "serves a model and answers on a route when `start` has returned, with the model that it names",
    "healthy": "`health` finds nothing wrong while it serves",
    "streams": "ends a stream with [DONE]",
    "errors": "rejects a request without a prompt with a status of 400 to 499",
    "lives": "`ended` waits as long as the engine lives",
    "stops": "`stop` returns; an engine that it started does not answer after that",
    "again": "can be started again after `stop`",
}
NUM_REQUESTS = 200
START_S, STOP_S = 600.0, 60.0
LIVE_S = 0.5
CHECKED = "checked"  # name of the engine


class _Told(CachedPrompt):
    """`tokens`: that engines have cached; the others do not tell."""

    def __init__(self, num_tokens: int, tokens: dict[str, int]) -> None:
        self.num_tokens, self._tokens = num_tokens, tokens

    def tokens_on(self, engine: str) -> int | None:
        return self._tokens.get(engine)

    def longest(self, among: Candidates) -> tuple[int, str, bool]:
        best = max(among.names, key=lambda name: self._tokens.get(name, 0))
        num = self._tokens.get(best, 0)
        return num, best if num else "", num > 0

    def sent(self, engine: str) -> None:
        """Count nothing: the contract sends nothing."""

    def ended(self, engine: str) -> None:
        """As `sent`."""


def requests(make: Callable[..., Router], seed: int, report: Report) -> Played:
    """Route requests among engines that come and go."""
    router = make()
    if not (isinstance(getattr(router, "name", None), str) and router.name):
        report("builds", "it has no name; give the class a text `name`.")
    chance = random.Random(seed)
    prompts = [chance.randbytes(chance.choice((0, 10, 500, 3000))) for _ in range(8)]
    for _ in range(NUM_REQUESTS):
        prompt = chance.choice(prompts) + chance.randbytes(chance.choice((0, 100)))
        names = chance.sample(("a", "b", "c", "d", "e"), chance.randint(1, 5))
        num_tokens, told = len(prompt) // 4 + 1, None
        if chance.random() < 0.5:
            told = _Told(num_tokens, {name: chance.randint(0, num_tokens) for name in names if chance.random() < 0.7})
        request = RouteRequest(
            num_tokens, chance.choice((None, 1, 256)), model="m", path=chance.choice(ROUTES), prompt=prompt, cached=told,
            attempt=chance.randint(1, 2),
        )  # fmt: skip
        engines = [
            EngineView(
                name, "hybrid", None if told is None else told.tokens_on(name),
                num_running=chance.choice((0, 1, 40)), num_waiting=chance.choice((0, 0, 9)),
                kv_use=chance.choice((None, 0.0, 0.9)), kind=chance.choice(("sagellm", "vllm")),
                device=chance.choice(("", "cpu", "cuda", "ascend")),
            )
            for name in names
        ]  # fmt: skip
        try:
            choice = router.choose(request, engines)
            if chance.random() < 0.1:
                router.forget(chance.choice(names))
        except (Exception, SystemExit) as error:
            report("raises_nothing", f"it raised {type(error).__name__}: {error}.")
            raise Broke from error
        try:
            check_choice(choice, Candidates.of(engines))
        except SageError as error:
            report("answers", str(error))
            raise Broke from error
    return Played(NUM_REQUESTS, set(ROUTER_RULES))


def views(make: Callable[..., ScalingPolicy], seed: int, report: Report) -> Played:
    """Decide on a load that rises, falls and stops, twice."""
    policy = make()
    if not (isinstance(getattr(policy, "name", None), str) and policy.name):
        report("builds", "it has no name; give the class a text `name`.")
    chance = random.Random(seed)
    asked = [_pool_view(chance, number) for number in range(NUM_REQUESTS)]
    try:
        options = policy.recorded({})
        answers = [policy.decide(view) for view in asked]
        again = make(**options)
        others = [again.decide(view) for view in asked]
    except (Exception, SystemExit) as error:
        report("raises_nothing", f"it raised {type(error).__name__}: {error}.")
        raise Broke from error
    for answer, other in zip(answers, others, strict=True):
        try:
            check_decision(answer)
        except SageError as error:
            report("answers", str(error))
            raise Broke from error
        if answer != other:
            report("repeats", f"it answered {answer!r}, and then {other!r}; decide by the views alone.")
    return Played(2 * NUM_REQUESTS, set(SCALING_RULES))


def _pool_view(chance: random.Random, number: int) -> PoolView:
    rate = chance.choice((0.0, 1.0, 3.0, 50.0)) * chance.random()
    num_ended, is_told = int(10 * rate), chance.random() < 0.8
    means: dict[str, Any] = {}
    if is_told and num_ended:
        means = {"prompt_tokens": 1 + 500 * chance.random(), "output_tokens": 1 + 200 * chance.random(),
                 "itl_s": chance.choice((None, 0.01 + chance.random())), "ttft_s": chance.random()}  # fmt: skip
    ready = chance.randint(0, 8)
    return PoolView(
        10.0 * (number + 1), 10.0, rate, num_ended, num_running=chance.randint(0, 50), num_waiting=chance.randint(0, 20),
        num_ready=ready, num_starting=chance.choice((0, 0, 2)), num_draining=chance.choice((0, 1)), max_engines=8,
        start_s=chance.choice((None, 8.0)), **means,
    )  # fmt: skip


def life(make: Callable[..., EngineKind], seed: int, report: Report) -> Played:
    """Start the engine, ask it, stop it and start it again."""
    seen = {"builds", "raises_nothing"}
    try:
        asyncio.run(_life(make(), report, seen))
    except SageError as error:
        report("serves", str(error))
    except asyncio.TimeoutError:
        report("serves", f"it does not start within {START_S:g} s, or does not stop within {STOP_S:g} s.")
    except (aiohttp.ClientError, OSError) as error:
        report("serves", f"it does not answer: {error}.")
    except Broke:
        raise
    except Exception as error:
        report("raises_nothing", f"it raised {type(error).__name__}: {error}.")
        raise Broke from error
    return Played(1, seen)


async def _life(engine: EngineKind, report: Report, seen: set[str]) -> None:
    async with _host() as gateway:
        fleet = gateway.fleet
        engine.attach(fleet, CHECKED)
        # A group is an engine of a fleet; its requests come through the gateway.
        start = (lambda: fleet.register(CHECKED, engine)) if engine.is_group else engine.start
        try:
            await within(start(), START_S)
            await _ask(engine, fleet.url if engine.is_group else engine.url, report, seen)
            await within(_stopped(engine, fleet), STOP_S)
            seen.add("stops")
            if engine.is_ours and not await engine.health():
                report("stops", f"{engine.url} answers after `stop`.")
            await within(start(), START_S)
            seen.add("again")
            if why := await engine.health():
                report("again", why)
        finally:
            await within(_stopped(engine, fleet), STOP_S)


async def _stopped(engine: EngineKind, fleet: Fleet) -> None:
    if CHECKED in fleet.engines:
        await fleet.unregister(CHECKED)
    else:
        await engine.stop()


@contextlib.asynccontextmanager
async def _host() -> AsyncIterator[Gateway]:
    """A fleet without engines, and its gateway on a free port."""
    listener = listen(HOST, 0)
    fleet = Fleet(LeastLoad(), GatewayMetrics())
    fleet.url = f"http://{HOST}:{listener.getsockname()[1]}"
    gateway = Gateway(fleet, ManagerConfig(), listener, secrets.token_hex(16))
    await fleet.start()
    await gateway.start()
    try:
        yield gateway
    finally:
        await gateway.stop(0.0)
        await fleet.stop()


async def _ask(engine: EngineKind, url: str, report: Report, seen: set[str]) -> None:
    seen |= {"serves", "healthy"}
    facts = await engine.facts()
    if engine.model is not None and engine.model not in facts.models:
        report("serves", f"it is to have {engine.model!r} and serves {', '.join(facts.models)}.")
    if why := await engine.health():
        report("healthy", why)
    model = engine.model or facts.models[0]
    ended = asyncio.ensure_future(engine.ended())
    try:
        for path in facts.routes:
            prompt = {ROUTES[0]: {"messages": [{"role": "user", "content": "Hello"}]}, ROUTES[1]: {"prompt": "Hello"}}.get(path)
            if prompt is None:  # embeddings are no stream
                continue
            seen |= {"streams", "errors"}
            status, said = await _post(engine, url + path, {"model": model, "max_tokens": 4, "stream": True} | prompt)
            if status != 200 or b"data: [DONE]" not in said:
                report("streams", f"{path} answers {status}: {said[-200:]!r}.")
            status, said = await _post(engine, url + path, {"model": model})
            if not 400 <= status < 500:
                report("errors", f"{path} without a prompt answers {status}: {said[:200]!r}.")
            elif not json.loads(as_openai(status, said, "")[1])["error"]["message"]:
                report("errors", f"{path} without a prompt answers {status} and no message.")
        await asyncio.wait({ended}, timeout=LIVE_S)
        seen.add("lives")
        if ended.done():
            report("lives", f"`ended` has returned {ended.result()!r} while it served.")
    finally:
        ended.cancel()
        await asyncio.gather(ended, return_exceptions=True)


async def _post(engine: EngineKind, url: str, body: dict[str, Any]) -> tuple[int, bytes]:
    async with engine.http.post(url, json=body, headers=key_header(engine.api_key)) as answer:
        return answer.status, await answer.read()


ROUTER_SUITE = Suite("router", ROUTER_RULES, {"requests": Scenario(requests, is_random=True)})
SCALING_SUITE = Suite("scaling policy", SCALING_RULES, {"views": Scenario(views, is_random=True)}, example={"engines": 2})
ENGINE_SUITE = Suite("engine kind", ENGINE_RULES, {"life": Scenario(life)}, example={"model": "smollm2"})
