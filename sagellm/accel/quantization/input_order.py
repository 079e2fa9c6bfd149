"""Rounding input by input, the largest inputs first; what it did is made up for in the weights of the inputs that follow.

Frantar et al., "GPTQ" (arXiv 2210.17323), with its activation order.
"""

from collections.abc import Callable

import torch

from sagellm.accel.quantization.groups import Grid

__all__ = ["InputOrder"]

BLOCK = 128  # inputs whose errors are carried to the others together
DAMPING = 0.01  # of the mean of the diagonal, added to it


class InputOrder:
    """The order of a site's inputs, and how an error in one is made up for by others.

    Args:
        gram: sum of x x^T over inputs x of calibration, [inputs, inputs].
    """

    def __init__(self, gram: torch.Tensor) -> None:
        self._order = gram.diagonal().argsort(descending=True)
        gram = gram[self._order][:, self._order].double()
        diagonal = gram.diagonal()
        diagonal += DAMPING * diagonal.mean().clamp(min=1e-12)
        inverse = torch.cholesky_inverse(torch.linalg.cholesky(gram))
        self._factor = torch.linalg.cholesky(inverse, upper=True).float()

    def levels(self, weight: torch.Tensor, grid: Grid) -> torch.Tensor:
        """Return levels of a grid, float32 [outputs, inputs]."""
        size = weight.shape[1] // grid.scales.shape[1]

        def nearest(at: int, column: torch.Tensor) -> torch.Tensor:
            return grid.of_group(at // size).rounded(column)

        return grid.levels(self.rounded(weight, nearest))

    def rounded(self, weight: torch.Tensor, nearest: Callable[[int, torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Return rounded weights, float32 [outputs, inputs].

        Args:
            nearest: from the number of an input and its weights, [outputs, 1], to the nearest ones that there are.
        """
        rest, factor, inputs = weight[:, self._order], self._factor, weight.shape[1]
        found = torch.empty_like(rest)
        for begin in range(0, inputs, BLOCK):
            end = min(begin + BLOCK, inputs)
            errors = torch.empty(len(rest), end - begin)
            for at in range(begin, end):
                column = rest[:, at : at + 1]
                found[:, at : at + 1] = nearest(int(self._order[at]), column)
                error = (column - found[:, at : at + 1])[:, 0] / factor[at, at]
                rest[:, at:end] -= torch.outer(error, factor[at, at:end])
                errors[:, at - begin] = error
            rest[:, end:] -= errors @ factor[begin:end, end:]
        return found[:, self._order.argsort()]
