"""Rounding of weights to levels of few bits, with a scale and a zero point for each group of inputs."""

from typing import NamedTuple

import torch

from sagellm.models.quantized import pack_awq

__all__ = ["Grid", "awq_tensors", "choose_grid", "error_of"]

SHRINKS = [1.0 - 0.05 * step for step in range(10)]  # of the range that the levels span
ROWS = 256  # of a weight whose groups are searched at once


class Grid(NamedTuple):
    """Levels that a weight [outputs, inputs] is rounded to: weight = scale * (level - zero).

    Attributes:
        scales: float32 [outputs, groups], exact in half precision, as checkpoints store them.
        zeros: float32 [outputs, groups], whole numbers.
        bits: levels go from 0 to 2 ** bits - 1.
    """

    scales: torch.Tensor
    zeros: torch.Tensor
    bits: int

    def levels(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the nearest levels, float32 [outputs, inputs]."""
        groups = weight.unflatten(1, (self.scales.shape[1], -1))
        rounded = torch.round(groups / self.scales[:, :, None]) + self.zeros[:, :, None]
        return rounded.clamp_(0, 2**self.bits - 1).flatten(1)

    def values(self, levels: torch.Tensor) -> torch.Tensor:
        """Return the weights of levels [outputs, inputs]."""
        groups = levels.unflatten(1, (self.scales.shape[1], -1))
        return ((groups - self.zeros[:, :, None]) * self.scales[:, :, None]).flatten(1)

    def of_group(self, group: int) -> "Grid":
        """Return the grid of one group of inputs."""
        return Grid(self.scales[:, group : group + 1], self.zeros[:, group : group + 1], self.bits)

    def rounded(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the nearest weights that the grid has."""
        return self.values(self.levels(weight))


def choose_grid(
    weight: torch.Tensor, bits: int, group_size: int, symmetric: bool = False, gram: torch.Tensor | None = None
) -> Grid:
    """Fit a grid to the smallest and the largest weight of each group.

    Args:
        weight: float32 [outputs, inputs].
        symmetric: the zero point is the middle level.
        gram: sum of x x^T over inputs x of calibration, [inputs, inputs]. With it each group's range is shrunk as far as that
            lowers the error of the layer's output (AWQ's clipping, arXiv 2306.00978).
    """
    groups = weight.unflatten(1, (-1, group_size))
    low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
    best = _grid(low, high, bits, symmetric)
    if gram is None:
        return best
    count = groups.shape[1]
    of_groups = gram.unflatten(0, (count, group_size)).unflatten(2, (count, group_size))
    blocks = of_groups.diagonal(dim1=0, dim2=2).permute(2, 0, 1)  # [groups, size, size]
    scales, zeros = best.scales.clone(), best.zeros.clone()
    for begin in range(0, len(weight), ROWS):
        rows = slice(begin, begin + ROWS)
        least = torch.full_like(scales[rows], torch.inf)
        for shrink in SHRINKS:
            grid = _grid(low[rows] * shrink, high[rows] * shrink, bits, symmetric)
            off = (grid.rounded(weight[rows]) - weight[rows]).unflatten(1, (count, group_size)).transpose(0, 1)
            error = ((off @ blocks) * off).sum(2).T  # [rows, groups]
            better = error < least
            least[better] = error[better]
            scales[rows][better], zeros[rows][better] = grid.scales[better], grid.zeros[better]
    return Grid(scales, zeros, bits)


def _grid(low: torch.Tensor, high: torch.Tensor, bits: int, symmetric: bool) -> Grid:
    top = 2**bits - 1
    if symmetric:
        scales = torch.maximum(-low, high) / (2 ** (bits - 1) - 1)
        zeros = torch.full_like(scales, 2 ** (bits - 1))
    else:
        scales = (high - low) / top
    # The least half that is not subnormal: a group of zeros then stays zero.
    scales = scales.clamp(min=6.2e-5).half().float()
    if not symmetric:
        zeros = torch.round(-low / scales).clamp_(0, top)
    return Grid(scales, zeros, bits)


def error_of(off: torch.Tensor, gram: torch.Tensor) -> float:
    """Return the summed squared error of a layer's output over the inputs of calibration.

    Args:
        off: error of the weight, [outputs, inputs].
        gram: sum of x x^T over these inputs.
    """
    return float(((off @ gram) * off).sum())


def awq_tensors(levels: torch.Tensor, grid: Grid) -> dict[str, torch.Tensor]:
    """Return the tensors of a layer in AutoAWQ's layout.

    Args:
        levels: float32 [outputs, inputs].
    """
    return {
        "qweight": pack_awq(levels.T, grid.bits),
        "qzeros": pack_awq(grid.zeros.T, grid.bits),
        "scales": grid.scales.T.half().contiguous(),
    }
