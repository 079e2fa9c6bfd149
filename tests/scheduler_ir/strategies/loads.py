"""Loads for the virtual queue, and what came out of them."""

import math
import random

from sagellm.core.scheduling import NO_SERVICE, ServiceLevel
from sagellm.scheduler_ir.contract.virtual_queue import Job, StepCosts, VirtualQueue
from sagellm.scheduler_ir.strategies.registry import make_strategy

CPU = StepCosts(prefill_s=0.01, prompt_token_s=2.5e-4, decode_s=0.02, request_s=5e-4)
CHAT_TTFT_S, CHAT_TPOT_S = 0.5, 0.1


def mixed(seed, per_s=4.0, num_jobs=200, priorities=(0, 0)):
    """Three chats with targets on each long document that has time; priorities of both."""
    chance = random.Random(seed)
    jobs, now_s = [], 0.0
    for number in range(num_jobs):
        now_s += chance.expovariate(per_s)
        if chance.random() < 0.75:
            service = ServiceLevel(priorities[0], "", math.inf, CHAT_TTFT_S, CHAT_TPOT_S)
            jobs.append(Job(number, now_s, chance.randint(20, 120), chance.randint(10, 40), service))
        else:
            service = ServiceLevel(priorities[1], "", math.inf, 60.0)
            jobs.append(Job(number, now_s, chance.randint(1500, 3500), chance.randint(10, 60), service))
    return jobs


def run(strategy, jobs, *, until_s=math.inf, **limits):
    """The queue when all is done, or it is `until_s`; `strategy`: a name, an object, or None for the engine's own."""
    strategy = make_strategy(strategy) if isinstance(strategy, str) else strategy
    queue = VirtualQueue(strategy, jobs, **{"costs": CPU, "num_blocks": 6000, **limits})
    assert queue.run(until_s=until_s) or until_s < math.inf
    return queue


def goodput(queue):
    """Jobs that met every target."""
    good = 0
    for job in queue.jobs.values():
        mean_s = sum(job.gaps_s) / max(len(job.gaps_s), 1)
        good += job.ttft_s <= job.service.ttft_s and mean_s <= job.service.tpot_s
    return good


def quantile(values, share):
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


def job(name, arrival_s=0.0, prompt=50, output=10, *, tenant="", priority=0, adapter="", **service):
    level = ServiceLevel(priority, tenant, **service) if tenant or priority or service else NO_SERVICE
    return Job(name, arrival_s, prompt, output, level, adapter)
