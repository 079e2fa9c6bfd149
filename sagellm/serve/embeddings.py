"""`/v1/embeddings`, in the form of OpenAI's API; `pooling` is a field of ours."""

import base64
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, Field

from sagellm.core.errors import EngineError
from sagellm.engines.lmdeploy.pooling import PoolingKind, embed_prompt
from sagellm.serve.parameters import Refused
from sagellm.serve.prompts import Prompts, in_turn, split_prompt, together
from sagellm.serve.service import SERVICE

if TYPE_CHECKING:
    import numpy as np

__all__ = ["Embed", "EmbeddingRequest", "embed_with", "embeddings"]

MAX_INPUTS = 2048  # as OpenAI's
# Embeds prompts of token ids, each as a vector.
Embed = Callable[[list[list[int]], PoolingKind], Awaitable[list["np.ndarray"]]]


class EmbeddingRequest(BaseModel):
    """Body of a request. `input`: a text, token ids, or a list of either; `pooling`: see `BaseEngine.embed`."""

    input: str | list[Any]
    model: str | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(default=None, description="Not supported: vectors have the hidden size of the model.")
    pooling: PoolingKind = "mean"
    user: str | None = Field(default=None, description="Changes no answer.")


async def embeddings(prompts: Prompts, embed: Embed, request: EmbeddingRequest, num_bytes: int) -> dict[str, Any]:
    """Return the answer to a request, without the name of the model.

    Args:
        num_bytes: size of its body.

    Raises:
        Refused: no input, too many or too long ones, or dimensions.
    """
    if request.dimensions is not None:
        raise Refused("dimensions is not supported by this server; vectors have the hidden size of the model. Leave it out.")
    given = split_prompt(request.input, "input")
    if len(given) > MAX_INPUTS:
        raise Refused(f"input has {len(given)} texts; allowed are up to {MAX_INPUTS}. Send them in several requests.")
    rows = [each if isinstance(each, list) else await in_turn(num_bytes, prompts.encode, each) for each in given]
    for tokens in rows:
        prompts.check_tokens(tokens)
    try:
        vectors = await embed(rows, request.pooling)
    except EngineError as error:
        raise Refused(str(error), 500) from None
    in_base64 = request.encoding_format == "base64"
    data = [
        {
            "object": "embedding", "index": number,
            "embedding": base64.b64encode(vector.astype("<f4").tobytes()).decode() if in_base64 else vector.tolist(),
        }
        for number, vector in enumerate(vectors)
    ]  # fmt: skip
    num_tokens = sum(map(len, rows))
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    return {"object": "list", "data": data, "usage": usage}


def embed_with(engine: Any, next_session: Callable[[int], int]) -> Embed:
    """Return what embeds prompts on a server's engine.

    Args:
        engine: LMDeploy's `AsyncEngine`.
        next_session: takes so many session ids that follow each other, and returns the first.
    """

    async def embed(prompts: list[list[int]], pooling: PoolingKind) -> list["np.ndarray"]:
        if engine.backend == "turbomind":
            raise Refused("/v1/embeddings is not supported by the engine turbomind; start the server with --engine pytorch.")
        first, service = next_session(len(prompts)), SERVICE.get()

        def one(number: int) -> Awaitable["np.ndarray"]:
            return embed_prompt(engine.engine, first + number, prompts[number], pooling, service=service)

        return await together(one, len(prompts), engine.backend_config.max_batch_size)

    return embed
