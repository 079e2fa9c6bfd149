"""Embeddings: the last hidden states of a prompt, pooled to one vector in the step that computes them."""

import asyncio
from typing import TYPE_CHECKING, Any, Literal, get_args

from sagellm.core.errors import EngineError

if TYPE_CHECKING:
    import numpy as np
    import torch

__all__ = [
    "POOLINGS", "Pool", "PoolingKind", "add_hidden_states", "embed_prompt", "infer_prompt", "is_pooled", "needs_every_token",
]  # fmt: skip

PoolingKind = Literal["mean", "last"]
POOLINGS: tuple[str, ...] = get_args(PoolingKind)
KEY = "sage_pooling"  # attribute of a request's configuration; `lmdeploy/sage_pooling.py` reads it


class Pool:
    """Hidden states of one prompt, added up over the forward passes that compute it.

    Attributes:
        kind: "mean" over all tokens, or the "last" token's.
        num_tokens: tokens whose hidden states were seen.
    """

    def __init__(self, kind: PoolingKind) -> None:
        self.kind, self.num_tokens = kind, 0
        self._total: np.ndarray | None = None

    def add(self, hidden: "torch.Tensor") -> None:
        """Add the hidden states of the next tokens: [tokens, hidden size]."""
        rows = hidden.float()  # a sum in bfloat16 would lose the later tokens
        new = (rows.sum(0) if self.kind == "mean" else rows[-1]).cpu().numpy()
        self._total = new if self._total is None or self.kind == "last" else self._total + new
        self.num_tokens += len(hidden)

    def vector(self) -> "np.ndarray":
        """Return the vector: [hidden size], float32, not normalised."""
        if self._total is None:
            raise EngineError("no hidden states of this prompt were computed.")
        return self._total / self.num_tokens if self.kind == "mean" else self._total


def add_hidden_states(pools: list[Pool | None], hidden: "torch.Tensor", lengths: list[int]) -> None:
    """Add the rows of a forward pass to the pools of its sequences.

    Args:
        pools: one a sequence; None where a sequence wants no vector.
        hidden: [tokens of all sequences, hidden size].
        lengths: tokens of each sequence.
    """
    for pool, rows in zip(pools, hidden.split(lengths), strict=True):
        if pool is not None:
            pool.add(rows)


def is_pooled(seq: Any) -> bool:
    """Whether LMDeploy's `SchedulerSequence` is to give a vector."""
    return getattr(seq.sampling_param, KEY, None) is not None


def needs_every_token(seq: Any) -> bool:
    """Whether each token of LMDeploy's `SchedulerSequence` must be computed, so that none may come from the prefix cache."""
    return getattr(seq.sampling_param, KEY, None) == "mean"


async def embed_prompt(
    engine: Any, session_id: int, prompt: list[int], kind: PoolingKind, normalize: bool = True, service: str | None = None
) -> "np.ndarray":
    """Compute the embedding of a prompt.

    Args:
        engine: LMDeploy's engine of the PyTorch backend.
        session_id: an unused one.
        prompt: token ids, shorter than the context.
        kind: the pooling.
        normalize: whether to scale the vector to length 1.
        service: JSON of a `ServiceRequest`, for the scheduler.

    Returns:
        [hidden size], float32.

    Raises:
        EngineError: the engine ended the request without a vector.
    """
    import numpy as np
    from lmdeploy.messages import GenerationConfig

    config = GenerationConfig(max_new_tokens=0, temperature=1.0, top_k=1)
    config.sage_pooling = kind  # no field of it, as `sage`
    config.sage = service
    status, vector = await infer_prompt(engine, session_id, prompt, config)
    if vector is None:
        raise EngineError(f"the engine ended the request with {status} and gave no embedding.")
    length = float(np.linalg.norm(vector))
    return vector / length if normalize and length else vector


async def infer_prompt(engine: Any, session_id: int, prompt: list[int], config: Any) -> tuple[Any, Any]:
    """Send a prompt that nothing is generated for, and end its session.

    Args:
        engine: LMDeploy's engine of the PyTorch backend.
        session_id: an unused one.
        prompt: token ids, shorter than the context.
        config: LMDeploy's `GenerationConfig`.

    Returns:
        The status of the request at its end, and the last of its `logits`; either is None where there was no such output.
    """
    instance, status, logits = engine.create_instance(), None, None
    try:
        async for output in instance.async_stream_infer(session_id, prompt, gen_config=config):
            status, logits = output.status, logits if output.logits is None else output.logits
    except asyncio.CancelledError:
        await instance.async_cancel(session_id)  # or the engine's side would wait for the next output without an end
        raise
    finally:
        await instance.async_end(session_id)
    return status, logits
