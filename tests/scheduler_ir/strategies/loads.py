"""Loads for the virtual engine, and what came out of them."""

import math
import random
from dataclasses import replace

from sagellm.core.scheduling import NO_SERVICE, ServiceLevel
from sagellm.scheduler_ir.simulation.base import EngineShape, LinearCosts
from sagellm.scheduler_ir.simulation.requests import VirtualRequest
from sagellm.scheduler_ir.simulation.virtual_engine import VirtualEngine
from sagellm.scheduler_ir.strategies.registry import make_strategy

SHAPE = EngineShape(block_size=16, num_blocks=6000, max_prefill_tokens=2048, max_batch_size=32, prefix_caching=False)
CPU = LinearCosts((0.01, 2.5e-4, 1e-9), (0.02, 5e-4, 0.0))
CHAT_TTFT_S, CHAT_TPOT_S = 0.5, 0.1


def mixed(seed, per_s=4.0, num_requests=200, priorities=(0, 0)):
    """Three chats with targets on each long document that has time; priorities of both."""
    chance = random.Random(seed)
    requests, now_s = [], 0.0
    for number in range(num_requests):
        now_s += chance.expovariate(per_s)
        if chance.random() < 0.75:
            service = ServiceLevel(priorities[0], "", math.inf, CHAT_TTFT_S, CHAT_TPOT_S)
            prompt, output = chance.randint(20, 120), chance.randint(10, 40)
        else:
            service = ServiceLevel(priorities[1], "", math.inf, 60.0)
            prompt, output = chance.randint(1500, 3500), chance.randint(10, 60)
        requests.append(VirtualRequest(number, now_s, prompt, output, service, max_new_tokens=output))
    return requests


def run(strategy, requests, *, until_s=math.inf, costs=CPU, **limits):
    """The engine when all is done, or it is `until_s`; `strategy`: a name, an object, or None for the engine's own."""
    strategy = make_strategy(strategy) if isinstance(strategy, str) else strategy
    engine = VirtualEngine(replace(SHAPE, **limits), costs, requests, strategy)
    assert engine.run(until_s=until_s) or until_s < math.inf
    return engine


def goodput(engine):
    """Requests that met every target."""
    good = 0
    for each in engine.requests.values():
        mean_s = sum(each.gaps_s) / max(len(each.gaps_s), 1)
        good += each.ttft_s <= each.service.ttft_s and mean_s <= each.service.tpot_s
    return good


def quantile(values, share):
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


def request(name, arrival_s=0.0, prompt=50, output=10, *, tenant="", priority=0, adapter="", **service):
    level = ServiceLevel(priority, tenant, **service) if tenant or priority or service else NO_SERVICE
    return VirtualRequest(name, arrival_s, prompt, output, level, adapter, max_new_tokens=output)
