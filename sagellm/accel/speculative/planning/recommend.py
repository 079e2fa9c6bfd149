"""From measured step times and an acceptance rate to a setting."""

from typing import NamedTuple

from sagellm.accel.speculative.planning.table import LatencyTable
from sagellm.core.errors import SpeculationError

__all__ = ["Setting", "recommend", "tokens_of_step"]


class Setting(NamedTuple):
    """Expected result of a lookahead.

    Attributes:
        batch, lookahead: sequences in a step, and guesses of each; 0: no speculation.
        tokens_per_s: of all sequences.
        token_s: between two tokens of a sequence, in the mean.
        step_s: until a stream moves on; it then gets several tokens at once.
        speedup: throughput by that without guesses at the same batch size.
        is_extrapolated: it lies beyond what was measured.
        meets_target: `token_s` is not above the target.
    """

    batch: int
    lookahead: int
    tokens_per_s: float
    token_s: float
    step_s: float
    speedup: float
    is_extrapolated: bool
    meets_target: bool


def recommend(
    table: LatencyTable, acceptance: float, *, target_s: float | None = None, batch: int | None = None
) -> Setting:
    """The setting of most tokens a second that keeps to the target; where none does, the one of the shortest `token_s`.

    Args:
        acceptance: the chance that a guess is right when those before it were: of all places, from 0 to 1.
        target_s: the mean time between two tokens of a sequence that is allowed; None: any.
        batch: sequences in a step; None: of those measured, whichever is best. Beyond those measured it is extrapolated.

    Raises:
        SpeculationError: a number out of range, or another batch where the table has one alone.
    """
    if not 0 <= acceptance <= 1:
        raise SpeculationError(f"acceptance is {acceptance!r}; give a share from 0 to 1, such as that of place 1 in /metrics.")
    if target_s is not None and not target_s > 0:
        raise SpeculationError(f"target_s is {target_s!r}; give seconds above 0, or leave it out.")
    if batch is not None and batch < 1:
        raise SpeculationError(f"batch is {batch!r}; give 1 or more, or leave it out.")
    if batch is not None and len(table.batches) == 1 and batch != table.batches[0]:
        known = table.batches[0]
        raise SpeculationError(
            f"the table has steps of {known} sequence{'s' * (known > 1)} alone, which say nothing of {batch}; measure more: "
            f"sagellm speculative profile --batches {min(known, batch)},{max(known, batch)} --out FILE."
        )
    settings = [
        _setting(table, acceptance, each, lookahead, target_s)
        for each in (table.batches if batch is None else (batch,))
        for lookahead in range(table.lookaheads[-1] + 1)
    ]
    good = [setting for setting in settings if setting.meets_target]
    if good:
        return max(good, key=lambda setting: (setting.tokens_per_s, -setting.lookahead))
    return min(settings, key=lambda setting: setting.token_s)


def tokens_of_step(acceptance: float, lookahead: int) -> float:
    """Tokens that a sequence gets in a step: 1 + a + a^2 + ... + a^lookahead."""
    return sum(acceptance**place for place in range(lookahead + 1))


def _setting(table: LatencyTable, acceptance: float, batch: int, lookahead: int, target_s: float | None) -> Setting:
    step_s = table.step_s(batch, lookahead)
    token_s = step_s / tokens_of_step(acceptance, lookahead)
    return Setting(
        batch, lookahead, batch / token_s, token_s, step_s, table.step_s(batch, 0) / token_s,
        not table.is_measured(batch, lookahead), target_s is None or token_s <= target_s,
    )  # fmt: skip
