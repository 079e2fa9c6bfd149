"""A request on the virtual clock."""

import math
from dataclasses import dataclass, field
from itertools import pairwise

from sagellm.core.hooks import Phase, RequestId, RequestView, ServiceLevel
from sagellm.core.scheduling import NO_SERVICE

__all__ = ["VirtualRequest"]


@dataclass(slots=True, eq=False)
class VirtualRequest:
    """A request and its progress: callers give the first fields, the engine writes those from `num_computed` on. 
    `num_to_generate` is hidden until it ends.

    Attributes:
        cached_tokens: of the prompt, found in the prefix cache at the first admission, if so much is cached.
        num_tokens: of prompt and answer; `num_computed` of them have their keys and values, as in LMDeploy's sequence.
        token_s: when each token of its answer was there.
        end_s: when it was complete; infinity before, and where it was cancelled.
    """

    request_id: RequestId
    arrival_s: float
    prompt_tokens: int
    num_to_generate: int
    service: ServiceLevel = NO_SERVICE
    adapter: str = ""
    max_new_tokens: int = 0
    cached_tokens: int = 0
    num_tokens: int = field(init=False)
    num_computed: int = field(default=0, init=False)
    num_generated: int = field(default=0, init=False)
    num_blocks: int = field(default=0, init=False)
    chunk: int | None = field(default=None, init=False)  # of the step that it is in: so many of its tokens alone
    has_run: bool = field(default=False, init=False)
    is_cancelled: bool = field(default=False, init=False)
    token_s: list[float] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self.num_tokens = self.prompt_tokens

    @property
    def num_left(self) -> int:
        """Tokens that are not computed: in a step of prompts it has all of them, or its chunk."""
        return self.num_tokens - self.num_computed

    @property
    def has_ended(self) -> bool:
        return self.is_cancelled or self.num_generated >= self.num_to_generate

    @property
    def end_s(self) -> float:
        return self.token_s[-1] if len(self.token_s) >= self.num_to_generate else math.inf

    @property
    def ttft_s(self) -> float:
        """Infinity before the first token."""
        return self.token_s[0] - self.arrival_s if self.token_s else math.inf

    @property
    def gaps_s(self) -> list[float]:
        """Between each token and the next."""
        return [later - earlier for earlier, later in pairwise(self.token_s)]

    def metadata(self, phase: Phase) -> RequestView:
        return RequestView(
            self.request_id, phase, self.num_tokens, self.num_computed, self.num_generated, self.num_blocks, self.arrival_s,
            self.adapter, self.service, self.max_new_tokens, self.token_s[0] if self.token_s else math.inf,
            self.token_s[-1] if self.token_s else math.inf,
        )  # fmt: skip
