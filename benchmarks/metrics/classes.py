"""A mixed load, class by class: the metrics of a round for the requests of each class alone."""

from collections.abc import Sequence

import numpy as np

from benchmarks.config import LoadClass, Slo
from benchmarks.errors import BenchmarkError
from benchmarks.load.samples import Samples
from benchmarks.metrics.compute import Measured, good, request_metrics, wall_s
from benchmarks.metrics.definitions import DEFINITIONS
from benchmarks.result import Definition

_TEXT = (
    "The metric whose name follows the dot, over the requests of the class before it alone. Rates are over the wall time of "
    "the whole round, so that those of all classes sum up to the round's; a request is good within the targets that its class "
    "asks for, and within the config's `slo` where it asks for none."
)
_COUNTED = {"output_tokens_per_s", "requests_per_s", "goodput_rps", "failed_requests"}
_KEPT = [name for name in DEFINITIONS if name in _COUNTED or name.startswith(("ttft_", "tpot_", "itl_", "e2e_"))]


def class_metrics(samples: Samples, load_class: np.ndarray, classes: Sequence[LoadClass], slo: Slo) -> Measured:
    """`CLASS.METRIC` for each class, and the round's own `goodput_rps`, each request judged by its class's targets. Nothing
    without classes.

    `load_class`: int [n], the class of each request, an index into `classes`.

    Raises:
        BenchmarkError: the answers of a class were not streamed, so that its TTFT is not known.
    """
    metrics: dict[str, float] = {}
    absent: dict[str, str] = {}
    round_s, num_good = wall_s(samples), 0
    for number, each in enumerate(classes):
        part, targets = samples.only(load_class == number), each.slo(slo)
        try:
            found = request_metrics(part, targets, round_s)
        except BenchmarkError as error:
            raise BenchmarkError(f"class {each.name}: {error}") from None
        metrics |= {f"{each.name}.{name}": value for name, value in found.metrics.items()}
        absent |= {f"{each.name}.{name}": why for name, why in found.absent.items()}
        num_good += int(np.count_nonzero(good(part, targets)))
    if classes and round_s > 0 and samples.ok.any():
        metrics["goodput_rps"] = num_good / round_s
    return Measured(metrics, absent)


def definitions_with(classes: Sequence[LoadClass]) -> dict[str, Definition]:
    """Those of every round, and of the classes' metrics."""
    known = {
        f"{each.name}.{name}": DEFINITIONS[name].model_copy(update={"text": _TEXT}) for each in classes for name in _KEPT
    }
    return DEFINITIONS | known
