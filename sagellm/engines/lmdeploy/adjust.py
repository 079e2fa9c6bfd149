"""Changes of the scores of a request: OpenAI's penalties and logit bias, as a logits processor of LMDeploy."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["ScoreChanges"]


@dataclass(frozen=True)
class ScoreChanges:
    """Travels to the engine process with the request, and is called for each token.

    Penalties count the tokens of the answer alone, as vLLM does; OpenAI's documentation leaves it open.

    Attributes:
        presence: subtracted from the score of a token that the answer has.
        frequency: subtracted as often as the answer has the token.
        bias: added to the scores of these tokens.
        num_prompt: tokens of the prompt.
        first: first token of the prompt.
        num_first: number of times that the prompt begins with it.
    """

    presence: float = 0.0
    frequency: float = 0.0
    bias: Mapping[int, float] = field(default_factory=dict)
    num_prompt: int = 0
    first: int = -1
    num_first: int = 0

    @classmethod
    def of(cls, presence: float, frequency: float, bias: Mapping[int, float], prompt: list[int]) -> "ScoreChanges":
        """Make the changes for a prompt."""
        num_first = next((place for place, token in enumerate(prompt) if token != prompt[0]), len(prompt))
        return cls(presence, frequency, dict(bias), len(prompt), prompt[0], num_first)

    def __call__(self, ids: "torch.Tensor", scores: "torch.Tensor") -> "torch.Tensor":
        """Return changed scores.

        Args:
            ids: [tokens] int64, padding, prompt and answer; LMDeploy pads in front.
            scores: [vocabulary].
        """
        import torch

        scores = scores.clone()
        if self.presence or self.frequency:
            answer = ids[self._padding(ids) + self.num_prompt :]
            tokens, counts = torch.unique(answer, return_counts=True)
            scores[tokens] -= (self.frequency * counts + self.presence).to(scores.dtype)
        if self.bias:
            where = torch.tensor(list(self.bias), device=scores.device)
            scores[where] += torch.tensor(list(self.bias.values()), device=scores.device, dtype=scores.dtype)
        return scores

    def _padding(self, ids: "torch.Tensor") -> int:
        """Count the tokens in front of the prompt, which are all the same."""
        others = (ids != ids[0]).nonzero()
        run = int(others[0]) if len(others) else len(ids)
        if int(ids[0]) == self.first:  # the prompt's own tokens, or padding that equals them
            run -= self.num_first
        return max(0, min(run, len(ids) - self.num_prompt))
