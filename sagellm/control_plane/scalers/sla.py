"""As many engines as keep to latency targets at the forecast rate, by a profile that measurements correct."""

import math
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from sagellm.control_plane.base import PoolView, ScalingDecision, ScalingPolicy
from sagellm.control_plane.sla.profile import SetupCosts, SLAProfile, read_profile
from sagellm.core.errors import PolicyError
from sagellm.core.hooks import Phase
from sagellm.core.step_times import num_pairs

__all__ = ["SLA", "Capacity"]

STEPS = 30  # of the search for the number of requests at once
SURPRISE = 3.0  # standard deviations of a Poisson process beyond which a rate counts as a new one
TAIL = 2.33  # standard deviations up to which 99 of 100 normal values lie
WAITS = 3.0  # mean waits up to which 95 of 100 requests lie: an exponential distribution
LEAST, MOST = 0.25, 8.0  # of the correction


class Capacity:
    """Predicts latencies of one engine at a rate of Poisson arrivals.

    Prompts interrupt the decode steps. The decode steps share the time that prompts leave.

    Args:
        role: hybrid, prefill (prompts alone) or decode (tokens after the first alone).
        max_batch_size: requests that run at once.
    """

    def __init__(self, costs: SetupCosts, max_batch_size: int, role: str = "hybrid") -> None:
        self._costs, self._max_batch_size, self._role = costs, max_batch_size, role

    def prompt_s(self, prompt_tokens: float) -> float:
        """Return the seconds of one prompt; on an engine that only decodes, of the step in which a request joins."""
        if self._role == "decode":
            return self._costs.prefill_s((1.0, 1.0, prompt_tokens))
        return self._costs.prefill_s((1.0, prompt_tokens, num_pairs(prompt_tokens, 0)))

    def itl_s(
        self, rate: float, num_running: float, prompt_tokens: float, output_tokens: float, factor: float = 1.0
    ) -> float:
        """Return the mean seconds between tokens with so many requests at once; infinity where prompts take all the time."""
        share = rate * factor * self.prompt_s(prompt_tokens)
        num = max(1.0, num_running)
        step_s = self._costs.seconds(Phase.DECODE, num, num, num * (prompt_tokens + output_tokens / 2))
        return factor * step_s / (1 - share) if share < 1 else math.inf

    def latencies(
        self, rate: float, engines: int, prompt_tokens: float, output_tokens: float, factor: float = 1.0
    ) -> tuple[float, float]:
        """Return seconds until the first token and between tokens that about 95 of 100 requests keep to; infinity: none does.

        Args:
            rate: requests a second of all engines. They take turns, so that arrivals at one vary less than chance.
            factor: the engines are so many times as slow as their profile.
        """
        prompt_s, more, each = factor * self.prompt_s(prompt_tokens), max(0.0, output_tokens - 1), rate / engines
        share = each * prompt_s
        if share >= 1:
            return math.inf, math.inf
        first_s = prompt_s + WAITS * share * prompt_s / (2 * engines * (1 - share))
        if self._role == "prefill" or not more:
            return first_s, 0.0
        num, itl_s = 1.0, 0.0
        for _ in range(STEPS):
            itl_s = self.itl_s(each, num, prompt_tokens, output_tokens, factor)
            num = each * more * itl_s
            if num > 2 * self._max_batch_size:  # it does not settle
                return math.inf, math.inf
        varies = TAIL * math.sqrt(num / engines)
        if num + varies > self._max_batch_size:
            return math.inf, math.inf
        return first_s + itl_s * (1 - share), itl_s + prompt_s * varies / more

    def engines(
        self, rate: float, prompt_tokens: float, output_tokens: float, ttft_s: float, itl_s: float, most: int,
        factor: float = 1.0,
    ) -> int:  # fmt: skip
        """Return the fewest engines that keep to both targets, or `most` where so many miss them too."""
        low, high = 1, most
        while low < high:
            middle = (low + high) // 2
            first_s, next_s = self.latencies(rate, middle, prompt_tokens, output_tokens, factor)
            low, high = (low, middle) if first_s <= ttft_s and next_s <= itl_s else (middle + 1, high)
        return low


class SLA(ScalingPolicy):
    """Takes the fewest engines that keep to the targets at the forecast rate.

    The forecast follows the measured rate slowly, unless this differs by more than chance explains; then it jumps to it. The
    times of the profile are multiplied by a correction: observed over predicted inter-token latency, smoothed.

    Args:
        profile: file of `sagellm profile sla`, or its content.
        ttft_ms, itl_ms: targets of the first token and of further ones, for 95 of 100 requests.
        tensor_parallel, lookahead: setup of the profile.
        tokens_of_step: tokens that a stream gets in a decode step on average, with guesses.
        max_batch_size: requests that run at once; None: the largest concurrency of the profile.
        use: part of the largest rate that engines are given.
        down_use: that part where engines are given up; the band between both keeps their number steady.
        smoothing: weight of the newest interval in the forecast.
        correction_weight: weight of the newest interval in the correction.
        catch_up_s: seconds in which engines are to work off requests that wait; None: they are not counted.

    Raises:
        ConfigError: no such profile.
        PolicyError: an invalid option.
    """

    name = "sla"

    def __init__(
        self, profile: str | dict[str, Any], ttft_ms: float = 500.0, itl_ms: float = 50.0, tensor_parallel: int = 1,
        lookahead: int = 0, tokens_of_step: float = 1.0, max_batch_size: int | None = None, use: float = 1.0,
        down_use: float = 0.9, smoothing: float = 0.2, correction_weight: float = 0.1, catch_up_s: float | None = 30.0,
    ) -> None:  # fmt: skip
        for what, value, most in (
            ("ttft_ms", ttft_ms, 1e9), ("itl_ms", itl_ms, 1e9), ("use", use, 1.0), ("down_use", down_use, use),
            ("smoothing", smoothing, 1.0), ("correction_weight", correction_weight, 1.0),
            ("tokens_of_step", tokens_of_step, 1e3), ("catch_up_s", 1.0 if catch_up_s is None else catch_up_s, 1e9),
            ("max_batch_size", 1 if max_batch_size is None else max_batch_size, 1e6),
        ):  # fmt: skip
            if not (isinstance(value, int | float) and 0 < value <= most):
                raise PolicyError(f"scaling policy sla: {what} is {value!r}; give a number above 0, at most {most:g}.")
        try:
            self._profile = SLAProfile.model_validate(profile) if isinstance(profile, dict) else read_profile(Path(profile))
        except ValidationError as error:
            raise PolicyError(f"scaling policy sla: profile is no profile: {error.errors()[0]['msg']}.") from None
        setup = (tensor_parallel, lookahead)
        points = self._profile.of(setup)
        if not points:
            known = "; ".join(f"tensor_parallel {each[0]}, lookahead {each[1]}" for each in self._profile.setups) or "none"
            raise PolicyError(f"scaling policy sla: the profile has no points of tensor_parallel {setup[0]}, lookahead "
                              f"{setup[1]}; it has {known}. Measure them, or name another setup.")  # fmt: skip
        self._costs = self._profile.costs(setup, tokens_of_step)
        self._max_batch_size = max_batch_size or max(each.concurrency for each in points)
        self._ttft_s, self._itl_s = ttft_ms / 1e3, itl_ms / 1e3
        self._use, self._down_use, self._catch_up_s = use, down_use, catch_up_s
        self._smoothing, self._correction_weight = smoothing, correction_weight
        self._rate: float | None = None
        self._correction = 1.0
        self._lengths: tuple[float, float] | None = None

    def recorded(self, options: dict[str, Any]) -> dict[str, Any]:
        return {**options, "profile": self._profile.model_dump(mode="json")}

    def decide(self, view: PoolView) -> ScalingDecision:
        rate = self._forecast(view)
        if view.prompt_tokens is not None and view.output_tokens is not None:
            self._lengths = (view.prompt_tokens, view.output_tokens)
        if self._lengths is None:
            return ScalingDecision(view.present, f"no request has ended yet; {rate:.2f} requests/s")
        capacity = Capacity(self._costs, self._max_batch_size, view.role)
        self._correct(view, capacity)
        waiting = 0.0 if self._catch_up_s is None else view.num_waiting / self._catch_up_s
        prompt, output = self._lengths
        targets = (self._ttft_s, self._itl_s)
        enough, few = (
            capacity.engines((rate + waiting) / use, prompt, output, *targets, view.max_engines, self._correction)
            for use in (self._use, self._down_use)
        )
        told = f"{rate:.2f} requests/s of {prompt:.0f} and {output:.0f} tokens, {view.num_waiting} wait"
        reason = f"{told}; correction {self._correction:.2f}; {enough} engines are enough, {few} with some to spare"
        return ScalingDecision(min(max(view.present, enough), few), reason)

    def _forecast(self, view: PoolView) -> float:
        known = self._rate
        chance = SURPRISE * math.sqrt(max(known or 0.0, view.rate) / view.interval_s)
        if known is None or abs(view.rate - known) > chance:
            self._rate = view.rate
        else:
            self._rate = known + self._smoothing * (view.rate - known)
        return self._rate

    def _correct(self, view: PoolView, capacity: Capacity) -> None:
        """Compare the observed inter-token latency with the prediction for as many requests at once as there were."""
        if view.itl_s is None or not view.num_ready or not view.num_ended or self._lengths is None or view.role == "prefill":
            return
        prompt, output = self._lengths
        rate = view.num_ended / view.interval_s / view.num_ready
        predicted = capacity.itl_s(rate, rate * output * view.itl_s, prompt, output, self._correction)
        if not math.isfinite(predicted):
            return
        seen = min(max(self._correction * view.itl_s / predicted, LEAST), MOST)
        self._correction += self._correction_weight * (seen - self._correction)
