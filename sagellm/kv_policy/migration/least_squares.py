"""Fits times as sums of few terms, none of them negative, and says how well."""

import math
from collections.abc import Sequence
from itertools import combinations

import numpy as np

from sagellm.core.config import Model
from sagellm.core.errors import PolicyError

__all__ = ["FitError", "fit_held_out"]

HELD_OUT = 5  # every fifth sample
FEWEST_SAMPLES = 5


class FitError(Model):
    """|predicted - measured| / measured over samples that the fit had not seen."""

    num_samples: int
    num_held_out: int
    median: float
    p90: float


def fit_held_out(name: str, rows: Sequence[tuple[Sequence[float], float]]) -> tuple[list[float], FitError]:
    """Coefficients of all samples, and the error of a fit without those held out.

    Args:
        name: what is fitted, for messages.
        rows: (terms, seconds) of each sample.

    Raises:
        PolicyError: fewer than 5 samples, one with times that are not above zero, or no term above zero in any.
    """
    if len(rows) < FEWEST_SAMPLES:
        raise PolicyError(f"{len(rows)} samples of {name}; give at least {FEWEST_SAMPLES}.")
    for terms, seconds in rows:
        if not (0 < seconds < math.inf) or not all(0 <= term < math.inf for term in terms):
            raise PolicyError(f"sample {tuple(terms), seconds} of {name}; sizes are at least 0 and seconds above 0.")
    if not any(any(terms) for terms, _ in rows):
        raise PolicyError(f"samples of {name} are all of size 0; measure larger ones.")
    terms = np.array([row[0] for row in rows], dtype=float)
    seconds = np.array([row[1] for row in rows], dtype=float)
    # Samples come sorted by size as a rule; drawn at random, those held out are of all sizes.
    is_held_out = np.random.default_rng(0).permutation(len(rows)) % HELD_OUT == 0
    predicted = terms[is_held_out] @ _fit(terms[~is_held_out], seconds[~is_held_out])
    errors = np.abs(predicted / seconds[is_held_out] - 1)
    error = FitError(
        num_samples=len(rows),
        num_held_out=len(errors),
        median=float(np.median(errors)),
        p90=float(np.quantile(errors, 0.9)),
    )
    return _fit(terms, seconds).tolist(), error


def _fit(terms: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Non-negative coefficients with the least squared relative error: the best of all choices of terms whose plain solution
    is not negative. Exact, and quick for the two or three terms there are."""
    relative = terms / seconds[:, None]
    scale = np.maximum(np.abs(relative).max(axis=0), 1e-300)  # bytes and ones differ by nine orders of magnitude
    best, least = np.zeros(terms.shape[1]), math.inf
    for size in range(1, terms.shape[1] + 1):
        for chosen in map(list, combinations(range(terms.shape[1]), size)):
            found, *_ = np.linalg.lstsq(relative[:, chosen] / scale[chosen], np.ones(len(seconds)), rcond=None)
            error = float(((relative[:, chosen] / scale[chosen] @ found - 1) ** 2).sum())
            if (found >= 0).all() and error < least:
                best, least = np.zeros(terms.shape[1]), error
                best[chosen] = found / scale[chosen]
    return best
