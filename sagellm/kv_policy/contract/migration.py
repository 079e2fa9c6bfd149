"""Contract of a migration policy: `sagellm check migration module:Class`.

Every rule is checked with random questions. A broken rule reports what was got, what is allowed and the seed.
"""

import math
import random
from collections.abc import Callable

from sagellm.core.contract import Broke, Played, Report, Scenario, Suite
from sagellm.core.hooks import MigrationPlan
from sagellm.kv_policy.base import (
    BlockKey,
    CachedBlock,
    MigrationContext,
    MigrationDecision,
    MigrationPolicy,
    MigrationPurpose,
    Tier,
)  # fmt: skip

__all__ = ["RULES", "SUITE"]

RULES = {
    "builds": "has a name and can be built",
    "raises_nothing": "raises at no question that keeps to the contract",
    "answers": "answers with a MigrationDecision that holds a MigrationPlan, a number of seconds and a text",
    "tiers": "plans a move between the tiers that it was asked about",
    "known": "names blocks of the question, in their order, and none twice",
    "first": "loads the first blocks of a prefix: a block is of no use without those before it",
    "asking": "answers the same if it is asked again at once",
    "deterministic": "answers the same to the same questions",
}
WAYS = (
    (MigrationPurpose.DEMOTE, Tier.GPU, Tier.CPU), (MigrationPurpose.DEMOTE, Tier.CPU, Tier.NVME),
    (MigrationPurpose.LOAD, Tier.CPU, Tier.GPU), (MigrationPurpose.LOAD, Tier.NVME, Tier.CPU),
)  # fmt: skip
NUM_QUESTIONS = 120
Make = Callable[..., MigrationPolicy]


def _questions(seed: int) -> list[MigrationContext]:
    chance = random.Random(seed)
    found = []
    for number in range(NUM_QUESTIONS):
        purpose, src, dst = WAYS[number % len(WAYS)]
        keys = [chance.getrandbits(64) for _ in range(chance.choice((0, 1, 2, 8, 40)))]
        parents = [None, *keys]
        size_bytes = chance.choice((1000, 1 << 20))
        blocks = tuple(
            CachedBlock(BlockKey(key), parents[depth], depth + 1, 64, size_bytes, chance.choice((0.0, 0.01)), "tenant")
            for depth, key in enumerate(keys)
        )
        found.append(MigrationContext(
            purpose, src, dst, blocks, num_tokens_before=64 * chance.randrange(5), queued_bytes=chance.choice((0, 1 << 24)),
            num_running=chance.randrange(9), time_s=0.1 * number, num_free=chance.choice((None, 0, 3)),
        ))  # fmt: skip
    return found


def _asked(policy: MigrationPolicy, question: MigrationContext, report: Report) -> MigrationDecision:
    try:
        decision = policy.plan(question)
    except (Exception, SystemExit) as error:
        report("raises_nothing", f"plan raised {type(error).__name__}: {error}.")
        raise Broke from error
    plan = getattr(decision, "plan", None)
    if not isinstance(decision, MigrationDecision) or not isinstance(plan, MigrationPlan) or not (
        isinstance(decision.net_benefit, (int, float)) and not math.isnan(decision.net_benefit)
        and isinstance(decision.reason, str)
    ):  # fmt: skip
        report("answers", f"it answered {decision!r}; answer with MigrationDecision(MigrationPlan(...), seconds, reason).")
        raise Broke
    return decision


def questions(make: Make, seed: int, report: Report) -> Played:
    """Ask two policies the same questions, the first one twice."""
    one, other = make(), make()
    if not (isinstance(getattr(one, "name", None), str) and one.name):
        report("builds", "it has no name; give the class a text `name`.")
    seen = {"builds", "raises_nothing", "answers", "tiers", "known", "asking", "deterministic"}
    for question in _questions(seed):
        decision = _asked(one, question, report)
        wanted, ids = [block.key for block in question.blocks], list(decision.plan.block_ids)
        if (decision.plan.src_tier, decision.plan.dst_tier) != (question.src_tier, question.dst_tier):
            report("tiers", f"asked for {question.src_tier.value} to {question.dst_tier.value}, it planned "
                            f"{decision.plan.src_tier} to {decision.plan.dst_tier}.")  # fmt: skip
        if ids != [key for key in wanted if key in set(ids)]:
            report("known", f"of {len(wanted)} blocks it named {len(ids)} others, some twice, or in another order.")
        elif question.purpose is MigrationPurpose.LOAD and ids != wanted[: len(ids)]:
            report("first", f"it loads {len(ids)} of {len(wanted)} blocks and leaves one before them out.")
        if question.purpose is MigrationPurpose.LOAD and wanted:
            seen.add("first")
        if _asked(one, question, report).plan != decision.plan:
            report("asking", "asked again at once, it answered otherwise.")
        if _asked(other, question, report).plan != decision.plan:
            report("deterministic", "another object of the class answered otherwise.")
        for policy in (one, other):
            if hasattr(policy, "observe_use"):
                policy.observe_use(wanted, question.time_s)
    return Played(3 * NUM_QUESTIONS, seen)


SUITE = Suite("policy", RULES, {"questions": Scenario(questions, is_random=True)}, example={"lifetime": "history"})
