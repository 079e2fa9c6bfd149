"""How far a request has come on its engine, from what the hooks tell: views of the queue and results of steps."""

from dataclasses import dataclass

from sagellm.core.hooks import Phase, RequestId, RequestView

__all__ = ["RequestProgress", "Seen"]


@dataclass(frozen=True, slots=True)
class Seen:
    """Changes of a request since the last view.

    Attributes:
        is_preempted: it lost its blocks since the last view.
        num_decoded: tokens decoded since that no result named, on engines whose results have no request ids.
    """

    is_preempted: bool = False
    num_decoded: int = 0


@dataclass(slots=True)
class RequestProgress:
    """Attributes:
    position: of so many of its first tokens the keys and values are there, at the least. The next view tells exactly.
    num_tokens: its length at the last view.
    num_heard: tokens computed since it joined or lost its blocks, as results told. The rest of `position` was found in a
    cache.
    num_generated: as far as views and results told.
    held_since_s: since when it has been held in every step; None where it was not held in the last one.
    """

    request_id: RequestId
    position: int = 0
    num_tokens: int = 0
    num_heard: int = 0
    num_generated: int = 0
    phase: Phase = Phase.PREFILL
    held_since_s: float | None = None
    has_ended: bool = False

    @property
    def num_found(self) -> int:
        """Tokens that were found in a cache."""
        return max(0, self.position - self.num_heard)

    def view(self, row: RequestView) -> Seen:
        """It waits for its next step, so every step it took part in has been told of."""
        is_prompt = row.phase is Phase.PREFILL
        is_preempted = is_prompt and (self.phase is Phase.DECODE or row.num_computed < self.position)
        num_decoded = row.num_generated - self.num_generated
        if not is_prompt and self.phase is Phase.PREFILL:
            num_decoded -= 1  # the step that computed the prompt's end has drawn this one
        if is_preempted:
            self.num_heard = 0
        self.position, self.num_tokens = row.num_computed, row.num_tokens
        self.num_generated, self.phase = row.num_generated, row.phase
        return Seen(is_preempted, max(0, num_decoded))

    def computed(self, phase: Phase, num_tokens: int) -> None:
        """A result names it."""
        self.position += num_tokens
        self.num_heard += num_tokens
        if phase is Phase.DECODE:
            self.num_generated += num_tokens  # several where guesses were right
            self.num_tokens += num_tokens
