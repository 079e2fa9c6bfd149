"""A request on the virtual clock."""

import math
from dataclasses import dataclass, field

from sagellm.core.hooks import Phase, RequestId, RequestMetadata, ServiceLevel
from sagellm.replay.schedule.base import RecordedRequest, RequestTimes

__all__ = ["VirtualRequest"]


@dataclass(slots=True, eq=False)
class VirtualRequest:
    """As LMDeploy's sequence: `num_tokens` of prompt and answer, `num_computed` of them have their keys and values."""

    request_id: RequestId
    arrival_s: float
    num_tokens: int
    num_to_generate: int
    cached_tokens: int
    service: ServiceLevel
    max_new_tokens: int
    num_computed: int = 0
    num_generated: int = 0
    num_blocks: int = 0
    chunk: int | None = None  # of the step that it is in: so many of its tokens alone
    has_run: bool = False
    token_s: list[float] = field(default_factory=list)

    @classmethod
    def of(cls, recorded: RecordedRequest, speedup: float) -> "VirtualRequest":
        arrival_s = recorded.arrival_s / speedup
        service = recorded.service
        if math.isfinite(service.deadline_s):
            service = service._replace(deadline_s=arrival_s + service.deadline_s - recorded.arrival_s)
        return cls(
            recorded.request_id, arrival_s, recorded.prompt_tokens, recorded.num_generated, recorded.cached_tokens, service,
            recorded.max_new_tokens,
        )  # fmt: skip

    @property
    def num_left(self) -> int:
        """Tokens that are not computed: in a step of prompts it has all of them, or its chunk."""
        return self.num_tokens - self.num_computed

    @property
    def has_ended(self) -> bool:
        return self.num_generated >= self.num_to_generate

    def metadata(self, phase: Phase) -> RequestMetadata:
        return RequestMetadata(
            self.request_id, phase, self.num_tokens, self.num_computed, self.num_generated, self.num_blocks, self.arrival_s,
            "", self.service, self.max_new_tokens, self.token_s[0] if self.token_s else math.inf,
            self.token_s[-1] if self.token_s else math.inf,
        )  # fmt: skip

    def times(self) -> RequestTimes:
        return RequestTimes(
            self.request_id, self.arrival_s, len(self.token_s), self.token_s[0], self.token_s[-1], tuple(self.token_s),
            self.service,
        )  # fmt: skip
