"""`UnifiedInferenceClient`: finds the manager by itself, and asks its gateway through the `openai` package."""

import os
from collections.abc import AsyncIterator, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from sagellm.control_plane.config import ManagerConfig
from sagellm.control_plane.found import KEY_VARIABLE, FoundManager, ask, find_manager
from sagellm.core.config import read_model
from sagellm.core.errors import ConfigError

if TYPE_CHECKING:
    from openai import AsyncOpenAI, OpenAI

    from sagellm.control_plane.manager import ControlPlaneManager

__all__ = ["UnifiedInferenceClient"]

EMBEDDED = "embedded"  # name of the engine that the client starts
Messages = str | Sequence[dict[str, Any]]


class UnifiedInferenceClient:
    """Asks a gateway. Errors are those of the `openai` package.

    Use it as a context manager, or call `close`: a manager that it started ends then, or with the process.

    Attributes:
        url: of the gateway, without /v1.
        model: name of the model that is asked.
    """

    def __init__(
        self, url: str, model: str | None = None, api_key: str | None = None, manager: "ControlPlaneManager | None" = None
    ) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self._key = api_key or os.environ.get(KEY_VARIABLE) or "none"
        self._manager = manager
        served = [one["id"] for one in ask(FoundManager(self.url), "GET", "/v1/models", api_key=self._key)["data"]]
        known = ", ".join(served) or "no model"
        if model is None and len(served) != 1:
            raise ConfigError(f"{self.url} serves {known}; name one of them: model=NAME, or --model NAME.")
        if model is not None and model not in served:
            raise ConfigError(f"{self.url} serves {known}, not {model!r}.")
        self.model = model or served[0]

    @classmethod
    def create(
        cls, url: str | None = None, *, model: str | None = None, api_key: str | None = None, config: str | Path | None = None,
        **settings: Any,
    ) -> "UnifiedInferenceClient":  # fmt: skip
        """Return a client of the manager at `url`, of the one that SAGELLM_URL names, or of the one that this user runs.

        Without any of them a manager is started in this process, on a free port.

        Args:
            model: name of the model. A manager that is started here serves this one: a name, folder, .gguf file or hub id.
            api_key: key of the gateway; None: that of SAGELLM_API_KEY.
            config: file of the manager that is started here, as `sagellm up` takes it.
            settings: settings of the engine that is started here, by the names of `SageConfig`. With `place="manager"` it
                runs in this process too.

        Raises:
            ConfigError: several models are served and none is named, or the model is not served.
            EngineError: nothing answers at `url`, or the engine cannot start.
        """
        found = find_manager(url)
        if found is not None:
            return cls(found.url, model, api_key)
        from sagellm.control_plane.manager import ControlPlaneManager

        given: dict[str, Any] = {"port": 0}
        if config is None:
            given["engines"] = {EMBEDDED: {"kind": "sagellm", "model": model} | settings}
        manager = ControlPlaneManager(read_model(ManagerConfig, None if config is None else Path(config), given), publish=False)
        manager.start()
        try:
            keys = [one.key for one in manager.config.api_key]
            served = next(iter(manager.status()["models"])) if config is None else model
            return cls(manager.url, served, api_key or next(iter(keys), None), manager)
        except BaseException:
            manager.stop()
            raise

    @cached_property
    def openai(self) -> "OpenAI":
        """The client of the `openai` package, for all that the methods below do not do."""
        from openai import OpenAI

        return OpenAI(base_url=f"{self.url}/v1", api_key=self._key)

    @cached_property
    def openai_async(self) -> "AsyncOpenAI":
        from openai import AsyncOpenAI

        return AsyncOpenAI(base_url=f"{self.url}/v1", api_key=self._key)

    def chat(self, messages: Messages, *, stream: bool = False, **fields: Any) -> str | Iterator[str]:
        """Answer a conversation, or a single message of the user. `fields`: those of the API, such as max_tokens.

        Returns:
            The text; with `stream` an iterator of its pieces.
        """
        answer = self.openai.chat.completions.create(**self._chat(messages), stream=stream, **fields)
        return _pieces(answer) if stream else answer.choices[0].message.content or ""

    def generate(self, prompt: str, *, stream: bool = False, **fields: Any) -> str | Iterator[str]:
        """Continue a text; see `chat`."""
        answer = self.openai.completions.create(model=self.model, prompt=prompt, stream=stream, **fields)
        return _pieces(answer) if stream else answer.choices[0].text

    def embed(self, texts: str | Sequence[str], **fields: Any) -> list[list[float]]:
        """Return one vector for each text."""
        answer = self.openai.embeddings.create(**self._embed(texts), **fields)
        return [one.embedding for one in answer.data]

    async def achat(self, messages: Messages, *, stream: bool = False, **fields: Any) -> str | AsyncIterator[str]:
        """As `chat`, on an event loop."""
        answer = await self.openai_async.chat.completions.create(**self._chat(messages), stream=stream, **fields)
        return _pieces_async(answer) if stream else answer.choices[0].message.content or ""

    async def agenerate(self, prompt: str, *, stream: bool = False, **fields: Any) -> str | AsyncIterator[str]:
        """As `generate`, on an event loop."""
        answer = await self.openai_async.completions.create(model=self.model, prompt=prompt, stream=stream, **fields)
        return _pieces_async(answer) if stream else answer.choices[0].text

    async def aembed(self, texts: str | Sequence[str], **fields: Any) -> list[list[float]]:
        """As `embed`, on an event loop."""
        answer = await self.openai_async.embeddings.create(**self._embed(texts), **fields)
        return [one.embedding for one in answer.data]

    def close(self) -> None:
        """End the manager, if this client started it."""
        if "openai" in vars(self):
            self.openai.close()
        if self._manager is not None:
            self._manager.stop()

    async def aclose(self) -> None:
        """As `close`, where methods of the event loop were used."""
        if "openai_async" in vars(self):
            await self.openai_async.close()
        self.close()

    def __enter__(self) -> "UnifiedInferenceClient":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _chat(self, messages: Messages) -> dict[str, Any]:
        given = [{"role": "user", "content": messages}] if isinstance(messages, str) else list(messages)
        return {"model": self.model, "messages": given}

    def _embed(self, texts: str | Sequence[str]) -> dict[str, Any]:
        given = [texts] if isinstance(texts, str) else list(texts)
        return {"model": self.model, "input": given, "encoding_format": "float"}


def _text(event: Any) -> str:
    """The text of an event; one of usage has no choice."""
    if not event.choices:
        return ""
    choice = event.choices[0]
    return (choice.delta.content if hasattr(choice, "delta") else choice.text) or ""


def _pieces(events: Any) -> Iterator[str]:
    with events:
        yield from filter(None, map(_text, events))


async def _pieces_async(events: Any) -> AsyncIterator[str]:
    async with events:
        async for event in events:
            if text := _text(event):
                yield text
