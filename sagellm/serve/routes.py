"""The routes of the server, one row each. Others are answered with 404, whatever LMDeploy's application has."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Annotated, Any, Literal, NamedTuple

from lmdeploy.serve.openai.protocol import ChatCompletionRequest, CompletionRequest, EncodeRequest, GenerateReqInput
from pydantic import BaseModel, ConfigDict, Field

from sagellm import __version__
from sagellm.core.errors import ConfigError
from sagellm.serve.embeddings import Embed, EmbeddingRequest, embeddings
from sagellm.serve.group import INFO, Membership
from sagellm.serve.parameters import Refused
from sagellm.serve.prompts import Prompts, in_turn
from sagellm.serve.sot import SoTWish

__all__ = [
    "CHAT", "COMPLETION", "ENCODE", "GENERATE", "HARMLESS", "HEALTH", "ROUTES", "Answer", "PolicyExchange", "Request", "Route",
    "Server", "route_of",
]  # fmt: skip

CHAT, COMPLETION, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
ENCODE, HEALTH = "/v1/encode", "/health"


class ChatRequest(ChatCompletionRequest):
    """LMDeploy's model of a chat, and those fields of OpenAI's API that change no answer, with the values that are taken."""

    metadata: Annotated[dict[str, str], Field(max_length=16)] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: Literal["in-memory", "in_memory", "24h"] | None = None
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None
    parallel_tool_calls: bool | None = None
    modalities: Annotated[list[Literal["text"]], Field(min_length=1)] | None = None


# Fields of a chat that change no answer, with the value that they must have; None: any that is allowed.
HARMLESS = {name: None for name in (*ChatRequest.__annotations__, "user")} | {"n": 1, "logprobs": False, "tool_choice": "none"}


class SoTRequest(ChatRequest):
    """A chat that may ask for skeleton-of-thought."""

    sot: SoTWish | None = None


class PolicyExchange(BaseModel):
    """Body of `POST /sagellm/policy`: the eviction policy that is to choose on a tier from now on."""

    model_config = ConfigDict(extra="forbid")

    policy: str
    tier: Literal["gpu", "cpu", "nvme"] = "gpu"
    options: dict[str, Any] = Field(default_factory=dict)


Answer = Mapping[str, Any]


class Server(NamedTuple):
    """Parts of a server that handlers use.

    Attributes:
        model_name: under which the model is served.
        prompts: renders and tokenizes.
        member: the server's part in a prefill/decode group, if it has one.
        policies: names of the eviction policies that clients may choose.
        command: `await command(name, **arguments)` asks the engine; raises ConfigError in the engine's words.
        embed: computes embeddings.
        describe: facts of the engine; it takes some time.
    """

    model_name: str
    prompts: Prompts
    member: Membership | None
    policies: tuple[str, ...]
    command: Callable[..., Awaitable[Any]]
    embed: Embed
    describe: Callable[[], Answer] = dict


class Request(NamedTuple):
    """A checked request: its body as the route's model reads it, and the size of the body in bytes."""

    body: Any
    num_bytes: int


class Route(NamedTuple):
    """One path.

    Attributes:
        access: who may call it: all; those with the API key, if the server has keys; the group, with a signature. "admin" is
            "key", also on a prefill engine, which otherwise works for its proxy alone.
        model: of the JSON body; None: the body is not looked at.
        handler: answers with a JSON object, and raises Refused. None: LMDeploy's handler answers.
    """

    path: str
    methods: tuple[str, ...]
    access: Literal["all", "key", "admin", "group"]
    model: type[BaseModel] | None = None
    handler: Callable[[Server, Request], Awaitable[Answer]] | None = None


async def encode(server: Server, request: Request) -> Answer:
    """Tokenize, without holding up other requests for as long as a text takes, as LMDeploy's handler would."""
    try:
        return await in_turn(request.num_bytes, server.prompts.encoded, request.body)
    except Exception as error:  # a template raises what it likes
        raise Refused(f"input cannot be encoded: {error}") from None


async def embed(server: Server, request: Request) -> Answer:
    answer = await embeddings(server.prompts, server.embed, request.body, request.num_bytes)
    return answer | {"model": server.model_name}


async def exchange_policy(server: Server, request: Request) -> Answer:
    """Exchange the eviction policy of a tier between two steps."""
    wanted: PolicyExchange = request.body
    if wanted.policy not in server.policies:  # a class of any module would be code that a client chooses
        raise Refused(
            f"policy {wanted.policy!r}: known are {', '.join(server.policies)}. To use a class of your own, start the server "
            "with it."
        )
    try:
        former = await server.command("exchange_policy", **wanted.model_dump())
    except ConfigError as error:
        raise Refused(str(error)) from None
    return {"tier": wanted.tier, "policy": wanted.policy, "former": former}


async def info(server: Server, request: Request) -> Answer:
    """Describe the engine: its device, and its abilities as a `CapabilityDescriptor`."""
    return {"model": server.model_name} | await asyncio.to_thread(server.describe)


async def describe(server: Server, request: Request) -> Answer:
    """Describe the routes that are served; LMDeploy's application has more."""
    paths: dict[str, Any] = {}
    schemas: dict[str, Any] = {}
    for route in ROUTES.values():
        if route.access == "group":
            continue
        operation: dict[str, Any] = {"responses": {"200": {"description": "The answer."}}}
        if route.model is not None:
            schema = route.model.model_json_schema(ref_template="#/components/schemas/{model}")
            schemas |= schema.pop("$defs", {}) | {route.model.__name__: schema}
            reference = {"$ref": f"#/components/schemas/{route.model.__name__}"}
            operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": reference}}}
        if route.access != "all":
            operation["security"] = [{"key": []}]
        paths[route.path] = {method.lower(): operation for method in route.methods if method != "HEAD"}
    keys = {"key": {"type": "http", "scheme": "bearer"}}
    info = {"title": "sageLLM", "version": __version__}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": {"schemas": schemas, "securitySchemes": keys}}


async def group_info(server: Server, request: Request) -> Answer:
    assert server.member is not None
    return server.member.info


async def drop_connection(server: Server, request: Request) -> Answer:
    """Do nothing: a connection between engines ends with either of them.

    LMDeploy's handler would end all connections to its engine process, over a coroutine that it pickles.
    """
    return {"success": True}


READ = ("GET", "HEAD")
ROUTES = {
    route.path: route
    for route in (
        Route("/", READ, "all"),
        Route(HEALTH, READ, "all"),
        Route("/metrics", READ, "all"),
        Route("/metrics/", READ, "all"),
        Route("/openapi.json", ("GET",), "key", handler=describe),
        Route("/v1/models", READ, "all"),
        Route(CHAT, ("POST",), "key", SoTRequest),
        Route(COMPLETION, ("POST",), "key", CompletionRequest),
        Route(GENERATE, ("POST",), "key", GenerateReqInput),
        Route("/v1/embeddings", ("POST",), "key", EmbeddingRequest, embed),
        Route(ENCODE, ("POST",), "key", EncodeRequest, encode),
        Route("/sagellm/policy", ("POST",), "admin", PolicyExchange, exchange_policy),
        Route("/sagellm/info", ("GET",), "key", handler=info),
        Route(INFO, ("GET",), "group", handler=group_info),
        Route("/distserve/engine_info", READ, "group"),
        Route("/distserve/p2p_initialize", ("POST",), "group"),
        Route("/distserve/p2p_connect", ("POST",), "group"),
        Route("/distserve/p2p_drop_connect", ("POST",), "group", handler=drop_connection),
        Route("/distserve/free_cache", ("POST",), "group"),
    )
}


def route_of(method: str, path: str) -> Route:
    """Raises Refused: there is no such path (404), or it does not take this method (405)."""
    route = ROUTES.get(path)
    if route is None:
        known = ", ".join(each.path for each in ROUTES.values() if each.access != "group" and each.path != "/metrics/")
        raise Refused(f"there is no {path} here; known are {known}.", 404)
    if method not in route.methods:
        raise Refused(f"{path} does not take {method}.", 405)
    return route
