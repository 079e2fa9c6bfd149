"""The interface of engines in this process, and the description of an engine."""

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Literal

from pydantic import TypeAdapter, ValidationError

from sagellm.accel.quantization.profile import QuantizationProfile
from sagellm.core.errors import ConfigError, EngineError
from sagellm.core.running import Branches, Generation, Request, SamplingParams

if TYPE_CHECKING:
    import numpy as np

KV_BITS = {"float32": 32, "float16": 16, "bfloat16": 16, "fp8": 8, "int8": 8, "int4": 4}  # of a number


@dataclass(frozen=True, slots=True)
class KVCacheSchema:
    """Type, shape and order of one KV block: `block_size` tokens, `num_layers` layers of keys and values.

    Two engines can exchange blocks where their schemas are equal, except for the block size.

    Attributes:
        dtype: a name of `KV_BITS`.
        v_head_dim: numbers of a head's value; None is as many as its key has. 0 where the key holds the value as well, as in
            DeepSeek's latent attention.
        scale_dtype: type of the scale and the zero point that each head of a token has, in its key and in its value; empty
            where numbers have none.
        layout: rows: the numbers of a head lie side by side; key_groups: values do, keys in groups of 16 tokens (see
            `sagellm/engines/lmdeploy/cpu/cache.py`).
    """

    block_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    v_head_dim: int | None = None
    scale_dtype: str = ""
    layout: Literal["rows", "key_groups"] = "rows"

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, all layers, keys and values, with their scales."""
        numbers = self.head_dim + (self.head_dim if self.v_head_dim is None else self.v_head_dim)
        scales = 2 * 2 * KV_BITS[self.scale_dtype] if self.scale_dtype else 0
        bits = numbers * KV_BITS[self.dtype] + scales
        return self.num_layers * self.block_size * self.num_kv_heads * bits // 8

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "KVCacheSchema":
        """
        Raises:
            ConfigError: the text is not a schema.
        """
        try:
            schema = TypeAdapter(cls).validate_json(text)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(str(part) for part in first["loc"])
            raise ConfigError(f"this is no KV cache schema: {where + ': ' if where else ''}{first['msg']}.") from None
        for name in (schema.dtype, schema.scale_dtype or schema.dtype):
            if name not in KV_BITS:
                raise ConfigError(f"a KV cache schema has dtype {name!r}; it may be {', '.join(KV_BITS)}.")
        return schema


@dataclass(frozen=True, slots=True)
class CapabilityDescriptor:
    """Abilities of an engine on this machine, found out on request.

    Attributes:
        hooks: hook points that the installed engine calls.
        dtypes: names of the dtypes it computes in.
        tensor_parallel: whether several workers can share a model.
        quantization: formats of quantised weights that it can load.
        kv_tiers: tiers that can hold KV blocks.
        speculation: names of speculative strategies and methods.
        roles: roles it can take in a prefill/decode group.
        missing: feature -> the reason why it is missing.
    """

    hooks: tuple[str, ...]
    dtypes: tuple[str, ...]
    tensor_parallel: bool
    quantization: tuple[str, ...] = ()
    kv_tiers: tuple[str, ...] = ()
    speculation: tuple[str, ...] = ()
    roles: tuple[str, ...] = ()
    missing: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """`quantization`: what `sagellm quantize` says of the model's weights; None for a model of other origin."""

    name: str
    version: str
    device: str
    kv_schema: KVCacheSchema
    num_kv_blocks: int
    capabilities: CapabilityDescriptor = field(repr=False)
    quantization: QuantizationProfile | None = field(default=None, repr=False)


class BaseEngine(ABC):
    """An engine in this process. Use it as a context manager: leaving it frees the model and the cache."""

    info: EngineInfo

    @abstractmethod
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        delays_s: Sequence[float] | None = None,
    ) -> list[Generation]:
        """Continue token sequences, all at once or each after its delay.

        Raises:
            EngineError: the engine refused a request (a deadline that has passed, too) or stopped.
        """

    def start(self, prompt: Sequence[int], params: SamplingParams | None = None, keep: bool = False) -> Request:
        """Start to continue a token sequence, and return at once.

        Args:
            keep: keep the request after its last token, so that it can be forked, until it is cancelled.

        Raises:
            EngineError: the prompt is empty or too long, or this engine cannot.
        """
        raise EngineError(f"{type(self).__name__} cannot start requests in the background; use generate.")

    def fork(
        self, request: Request, prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None, num_tokens: int | None = None,
    ) -> Branches:  # fmt: skip
        """Let a request branch: each branch continues its tokens so far, and a prompt behind them.

        Keys and values of the common tokens are shared. Where this is impossible they are computed again. The request goes on.

        Args:
            request: of `start` or of an earlier fork; it runs, or is kept.
            prompts: token ids of each branch behind the common ones; a branch may have none.
            params: of all branches, or of each; None: those of the request. A branch without `service` has the parent's.
            num_tokens: how many of the request's new tokens the branches have; None: all so far. With 0 they are samples of
                its prompt; with fewer than all they step back.

        Raises:
            EngineError: the request is another engine's, or has ended; no prompts, too many, or one that is too long.
        """
        raise EngineError(f"{type(self).__name__} cannot fork requests; use generate with whole prompts.")

    @abstractmethod
    def prompt_logits(self, prompt: Sequence[int]) -> "np.ndarray":
        """Compute the scores of every next token after each token of a prompt.

        Returns:
            [tokens, vocabulary], float32; row i scores the token at i + 1.

        Raises:
            EngineError: the prompt is empty, or longer than the context or the KV pool.
        """

    @abstractmethod
    def embed(
        self, prompts: Sequence[Sequence[int]], pooling: Literal["mean", "last"] = "mean", normalize: bool = True
    ) -> "np.ndarray":
        """Compute embeddings: the last hidden states of each prompt, after the final norm, pooled to one vector.

        Args:
            prompts: token ids of each; one at least. The engine batches them.
            pooling: "mean" over the tokens, or the "last" token's.
            normalize: whether to scale each vector to length 1.

        Returns:
            [prompts, hidden size], float32.

        Raises:
            EngineError: a prompt is empty or longer than the context, or an unknown pooling.
        """

    @abstractmethod
    def chat(self, messages: Sequence[dict[str, str]], params: SamplingParams | None = None) -> str:
        """Answer a conversation in the OpenAI form, through the model's own chat template."""

    @abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> "BaseEngine":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
