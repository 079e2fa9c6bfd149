"""One attempt of a request in a group: its engines, the copy for the prefill engine, and what both are told at its end."""

import asyncio
import secrets
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import aiohttp

from sagellm.comm_backend.control import sign_request
from sagellm.core.errors import ConfigError
from sagellm.pd.answers import cause_of, words_of
from sagellm.pd.base import RouteDecision, RouteRequest
from sagellm.pd.bodies import Body
from sagellm.pd.engine import Engine
from sagellm.pd.group import Group
from sagellm.pd.routing import Router
from sagellm.pd.tokens import guess_tokens

__all__ = ["Route", "Sending", "find_route"]


class Route(NamedTuple):
    """The engines of a request.

    Attributes:
        first: computes the prompt; None: `second` computes it.
        second: decodes.
        request: as the policy saw it.
        cached: tokens of the prompt that an engine has cached, by its URL.
        num_faults: of the policy in this choice; 1 where it was switched off.
    """

    decision: RouteDecision
    first: Engine | None
    second: Engine
    request: RouteRequest
    cached: dict[str, int]
    num_faults: int


def find_route(
    group: Group, router: Router, body: Body, tokens: list[list[int]] | None, attempt: int, without: Collection[str]
) -> Route:
    """Choose the engines of a request.

    Args:
        tokens: of each prompt; None where they are not known.
        without: instances that the request must not go to.

    Raises:
        PolicyError: no engine decodes.
    """
    num_tokens = sum(map(len, tokens)) if tokens else guess_tokens(body.raw)
    one = tokens[0] if tokens and len(tokens) == 1 else None
    can_split = body.num_prompts == body.num_answers == 1 and num_tokens > 1 and "sot" not in body.raw
    request = RouteRequest(num_tokens, body.max_tokens, can_split, tokens is None, attempt)
    faults = router.num_faults
    views = group.views(body.model, one, without)
    decision = router.choose(request, views)
    first = group.engines.get(decision.prefill_on) if decision.prefill_on else None
    cached = {view.engine_id: view.cached_tokens for view in views}
    return Route(decision, first, group.engines[decision.decode_on], request, cached, router.num_faults - faults)


class Sending:
    """Sends a request to the engines of its route. Inside `async with` the prefill engine computes its copy.

    Args:
        on_prefill: called at the end of the prefill engine's part with the cause and the words of its failure, or empty ones.

    Attributes:
        is_served: set it where the whole answer came; else the prefill engine is told at the end that nothing is fetched.
    """

    def __init__(
        self, group: Group, route: Route, path: str, body: Body, headers: dict[str, str],
        on_prefill: Callable[[str, str], None],
    ) -> None:  # fmt: skip
        self._group, self._route, self._path, self._body, self._headers = group, route, path, body, headers
        self._on_prefill = on_prefill
        self._transfer_id = secrets.randbits(63)
        self._prefill: asyncio.Task | None = None
        self.is_served = False

    async def __aenter__(self) -> "Sending":
        first, second = self._route.first, self._route.second
        computes = first or second
        computes.sent(self._transfer_id, max(1, self._route.request.num_tokens - self._route.cached.get(computes.url, 0)))
        second.num_streams += 1
        if first is not None:
            self._prefill = asyncio.create_task(self._compute(first))
        return self

    async def __aexit__(self, *error: Any) -> None:
        first, second = self._route.first, self._route.second
        second.num_streams -= 1
        (first or second).computed(self._transfer_id)
        if self._prefill is not None:
            self._prefill.cancel()  # it is of no use after the request
            await asyncio.gather(self._prefill, return_exceptions=True)
        if first is not None and not self.is_served:  # the decoding engine may not live to do it
            self._group.give_up(first, self._transfer_id)

    def post(self) -> Any:
        """Return the request to the engine that decodes, a context manager that gives its answer."""
        first = self._route.first
        content = self._body.content if first is None else self._body.for_decode(first.url, self._transfer_id)
        return self._post(self._route.second, content)

    def note_first_byte(self) -> None:
        """The prompt is computed."""
        (self._route.first or self._route.second).computed(self._transfer_id)

    async def _compute(self, first: Engine) -> None:
        """Its answer says nothing: the decoding engine fetches the keys and values, or computes them where that fails."""
        cause = words = ""
        try:
            async with self._post(first, self._body.for_prefill(self._route.second.url, self._transfer_id)) as answer:
                text = await answer.text()
                if answer.status != 200:
                    cause, words = f"status {answer.status}", text[:300]
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as error:
            cause, words = cause_of(error), words_of(error)
        finally:
            first.computed(self._transfer_id)
        if cause:
            self._group.give_up(first, self._transfer_id)  # or the decoding engine would wait until its deadline
        self._on_prefill(cause, words)

    def _post(self, engine: Engine, content: bytes) -> Any:
        http = self._group.http
        if http is None:
            raise ConfigError("the group is not started.")
        signed = self._headers | sign_request(self._group.key, "POST", self._path, content)
        return http.post(engine.url + self._path, data=content, headers=signed)
