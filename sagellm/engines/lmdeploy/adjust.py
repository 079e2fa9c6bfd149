"""Changes of the scores of a request: OpenAI's penalties and logit bias, as a logits processor of LMDeploy."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sagellm.core.running import PaddedPrompt

if TYPE_CHECKING:
    import torch

__all__ = ["ScoreChanges"]

NO_PROMPT = PaddedPrompt()


@dataclass(frozen=True)
class ScoreChanges:
    """Travels to the engine process with the request, and is called for each token.

    Penalties count the tokens of the answer alone, as vLLM does; OpenAI's documentation leaves it open.

    Attributes:
        presence: subtracted from the score of a token that the answer has.
        frequency: subtracted as often as the answer has the token.
        bias: added to the scores of these tokens.
        prompt: where the prompt lies.
    """

    presence: float = 0.0
    frequency: float = 0.0
    bias: Mapping[int, float] = field(default_factory=dict)
    prompt: PaddedPrompt = NO_PROMPT

    def __call__(self, ids: "torch.Tensor", scores: "torch.Tensor") -> "torch.Tensor":
        """Return changed scores.

        Args:
            ids: [tokens] int64, padding, prompt and answer; LMDeploy pads in front.
            scores: [vocabulary].
        """
        import torch

        scores = scores.clone()
        if self.presence or self.frequency:
            answer = ids[self.prompt.end(ids) :]
            tokens, counts = torch.unique(answer, return_counts=True)
            scores[tokens] -= (self.frequency * counts + self.presence).to(scores.dtype)
        if self.bias:
            where = torch.tensor(list(self.bias), device=scores.device)
            scores[where] += torch.tensor(list(self.bias.values()), device=scores.device, dtype=scores.dtype)
        return scores
