"""Any OpenAI server, by its URL: another machine's, LMDeploy's own, llama.cpp's, a provider's."""

import asyncio
from pathlib import Path

from sagellm.comm_backend.control import read_key
from sagellm.control_plane.base import EngineKind, forever
from sagellm.control_plane.probe import base_url
from sagellm.core.errors import EngineError
from sagellm.models import find_model, prepare_model

__all__ = ["OpenAIEndpoint"]


class OpenAIEndpoint(EngineKind):
    """A server of others. It is not ended with the manager.

    Args:
        url: http://host:port, with or without /v1.
        model: a model that it must have; the gateway offers this one only. None: all that it has.
        api_key: key that it wants.
        device: type of its device, for routing by hardware; it cannot be asked for.
        feed_key_file: of a server of this project, the file of its --pd-key-file; then it tells which prefixes it has cached.
        tokenizer: model with its tokenizer, by name, folder or hub id; needed if no other engine of the model is started here.

    Raises:
        ConfigError: no URL, no usable key, or an unknown model.
    """

    name = "openai"
    metrics = {  # noqa: RUF012
        "running": "vllm:num_requests_running", "waiting": "vllm:num_requests_waiting", "kv_use": "vllm:kv_cache_usage_perc",
    }  # fmt: skip

    def __init__(
        self, url: str, model: str | None = None, api_key: str | None = None, device: str = "",
        feed_key_file: str | Path | None = None, tokenizer: str | None = None,
    ) -> None:  # fmt: skip
        self.feed_key = None if feed_key_file is None else read_key(Path(feed_key_file))
        self._tokenizer = None if tokenizer is None else find_model(Path(tokenizer))
        self.url, self.model, self.api_key, self.device = base_url(url), model, api_key, device

    async def start(self) -> None:
        await self.facts()  # raises where nothing answers
        try:
            why = await self.health()
        except asyncio.TimeoutError:
            why = "it does not answer"
        if why:
            raise EngineError(f"{self.url}: {why}.")

    async def stop(self, grace_s: float = 10.0) -> None:
        """Leave it alone."""

    def model_folder(self) -> Path | None:
        return None if self._tokenizer is None else prepare_model(self._tokenizer)

    async def ended(self) -> str:
        return await forever()
