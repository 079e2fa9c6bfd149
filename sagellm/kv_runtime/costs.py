"""Measurements of a running engine, for a cost model: how long prompts take, and copies between tiers."""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from sagellm.core.errors import PolicyError
from sagellm.core.hooks import Phase, StepResult

Copies = Mapping[str, Sequence[tuple[int, float]]]  # by link, as "cpu->gpu": (bytes, seconds) of each copy

NUM_SAMPLES = 256  # the last ones of a kind
MIN_SAMPLES = 8
OFTEN = 256  # samples between two fits, once there were as many


class Costs:
    """Collects samples, and says when a new fit is due: after 8, 16, 32 prompts and so on, then every `OFTEN`."""

    def __init__(self) -> None:
        self._prefill: deque[tuple[int, int, float]] = deque(maxlen=NUM_SAMPLES)
        self._copies = {name: deque[tuple[int, float]](maxlen=NUM_SAMPLES) for name in ("gpu->cpu", "cpu->gpu")}
        self._num_prefills = 0
        self._next_fit = MIN_SAMPLES

    def add(self, step: StepResult) -> None:
        """A step has ended. Only prompts that were computed alone count, since only then the cost of their tokens is known."""
        if step.phase is Phase.PREFILL and step.num_requests == 1 and step.num_tokens > 0 and step.duration_s > 0:
            self._prefill.append((step.num_tokens, step.num_context_tokens, step.duration_s))
            self._num_prefills += 1
        if step.swap_s > 0 and (step.bytes_in > 0) != (step.bytes_out > 0):
            name = "cpu->gpu" if step.bytes_in else "gpu->cpu"
            self._copies[name].append((step.bytes_in or step.bytes_out, step.swap_s))

    def fitted(self, kind: Any, copies: Copies) -> str | None:
        """JSON of a model of this kind (`CostBenefitModel`) that fits the samples; None if none is due, or they fit none."""
        if self._num_prefills < self._next_fit:
            return None
        self._next_fit = min(2 * self._next_fit, self._num_prefills + OFTEN)
        links = {name: list(samples) for name, samples in {**self._copies, **copies}.items()}
        try:
            enough = {name: samples for name, samples in links.items() if len(samples) >= MIN_SAMPLES}
            return str(kind.fit(prefill=list(self._prefill), copies=enough).to_json())
        except PolicyError:
            return None
