"""The optimizer Muon in float32.

`torch.optim.Muon` computes in bfloat16, which takes 30 times as long on a processor without bfloat16 products.
"""

from collections.abc import Iterable

import torch

__all__ = ["Muon"]

QUINTIC = (3.4445, -4.7750, 2.0315)  # of the iteration; they make its slope at 0 steep
NUM_ITERATIONS, EPSILON = 5, 1e-7


class Muon(torch.optim.Optimizer):
    """Momentum whose update of a matrix is made nearly orthogonal (Jordan et al. 2024), with decoupled weight decay.

    Args:
        params: matrices.
        momentum: share of the former average of gradients that is kept. The update looks ahead (Nesterov).
    """

    def __init__(self, params: Iterable[torch.nn.Parameter], lr: float, momentum: float, weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:
        """Update all matrices by their gradients."""
        for group in self.param_groups:
            for matrix in group["params"]:
                average = self.state[matrix].setdefault("average", torch.zeros_like(matrix))
                average.lerp_(matrix.grad, 1 - group["momentum"])
                update = orthogonalized(matrix.grad.lerp(average, group["momentum"]))
                rows, columns = matrix.shape
                matrix.mul_(1 - group["lr"] * group["weight_decay"])
                matrix.add_(update, alpha=-group["lr"] * max(1.0, rows / columns) ** 0.5)


def orthogonalized(matrix: torch.Tensor) -> torch.Tensor:
    """Return a matrix with the singular vectors of this one, and singular values near 1 (Newton-Schulz iteration)."""
    if matrix.shape[0] > matrix.shape[1]:
        return orthogonalized(matrix.T).T
    linear, cubic, quintic = QUINTIC
    result = matrix / matrix.norm().clamp(min=EPSILON)
    for _ in range(NUM_ITERATIONS):
        squares = result @ result.T
        result = linear * result + (cubic * squares + quintic * squares @ squares) @ result
    return result
