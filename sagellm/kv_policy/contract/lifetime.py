"""Contract of a lifetime predictor: `sagellm check lifetime module:Class`."""

import math
import random
from collections.abc import Callable

from sagellm.core.contract import Broke, Played, Report, Scenario, Suite
from sagellm.kv_policy.base import BlockKey, LifetimePredictor

__all__ = ["RULES", "SUITE"]

RULES = {
    "builds": "has a name and can be built",
    "raises_nothing": "raises at no use and no question that keeps to the contract",
    "answers": "predicts seconds, 0 or more; infinity for never",
    "quantile": "predicts no shorter time for a higher probability",
    "asking": "predicts the same if it is asked again at once",
    "deterministic": "predicts the same after the same uses",
}
QUANTILES = (0.1, 0.5, 0.9)
NUM_USES, NUM_KEYS = 400, 30
Make = Callable[..., LifetimePredictor]


def _asked(predictor: LifetimePredictor, key: BlockKey, time_s: float, report: Report) -> list[float]:
    """Predictions for each quantile, of a block that may be unknown."""
    try:
        found = [predictor.predict_ttl(key, time_s, quantile) for quantile in QUANTILES]
    except (Exception, SystemExit) as error:
        report("raises_nothing", f"predict_ttl raised {type(error).__name__}: {error}.")
        raise Broke from error
    if any(isinstance(each, bool) or not isinstance(each, (int, float)) or not each >= 0 for each in found):
        report("answers", f"it predicted {found}; answer with seconds from 0 on, or infinity.")
        raise Broke
    return [float(each) for each in found]


def uses(make: Make, seed: int, report: Report) -> Played:
    """Tell two predictors the same uses, and ask both after each."""
    one, other = make(), make()
    if not (isinstance(getattr(one, "name", None), str) and one.name):
        report("builds", "it has no name; give the class a text `name`.")
    chance = random.Random(seed)
    time_s = 0.0
    for _ in range(NUM_USES):
        time_s += chance.choice((0.0, 0.01, 1.0, 300.0))
        key = BlockKey(min(chance.randrange(NUM_KEYS), chance.randrange(NUM_KEYS)))
        for predictor in (one, other):
            try:
                predictor.observe(key, time_s)
            except (Exception, SystemExit) as error:
                report("raises_nothing", f"observe raised {type(error).__name__}: {error}.")
                raise Broke from error
        asked = BlockKey(chance.randrange(2 * NUM_KEYS))  # half of them were never used
        found = _asked(one, asked, time_s, report)
        if sorted(found) != found:
            report("quantile", f"for {QUANTILES} it predicted {found} seconds; the times must not fall.")
        if not _same(_asked(one, asked, time_s, report), found):
            report("asking", "asked again at once, it predicted otherwise.")
        if not _same(_asked(other, asked, time_s, report), found):
            report("deterministic", "another object of the class, told the same uses, predicted otherwise.")
    return Played(4 * NUM_USES, set(RULES))


def _same(ours: list[float], theirs: list[float]) -> bool:
    return all(math.isclose(one, other, rel_tol=1e-9) for one, other in zip(ours, theirs, strict=True))


SUITE = Suite("predictor", RULES, {"uses": Scenario(uses, is_random=True)}, example={"max_keys": 1000})
