"""Checks of a plug-in's answers, for every engine: each turns an answer into plain values or raises `Nonsense`."""

from collections.abc import Iterable
from itertools import islice
from operator import index
from typing import Any

import numpy as np

from sagellm.core.collectives import read_rules
from sagellm.core.hooks import EvictionDecision, Phase, ScheduleDecision, StepView, VictimRequest
from sagellm.core.host import Nonsense
from sagellm.core.victims import Candidates

MOST_RULES = 1000  # of a step


def check_victims(answer: Any, request: VictimRequest) -> EvictionDecision:
    """All that the contract asks for. O(all candidates)."""
    decision = check_choice(answer, len(request.block_ids))
    chosen = set(decision.victims)
    foreign = chosen - set(request.block_ids.tolist())
    if foreign:
        raise foreign_victims(foreign)
    if orphan := orphaned(chosen, request.candidates):
        raise Nonsense(orphan)
    return decision


def check_choice(answer: Any, num_candidates: int) -> EvictionDecision:
    """Distinct numbers, no more than there are, and a reason for each or for none. O(victims)."""
    decision = answer if isinstance(answer, EvictionDecision) else EvictionDecision(answer)
    if len(decision.victims) > num_candidates:
        raise Nonsense(f"{len(decision.victims)} victims; there are {num_candidates} candidates")
    victims = [int(block) for block in decision.victims]
    if len(set(victims)) != len(victims):
        raise Nonsense(f"victims {victims} name a block twice")
    reasons = [str(reason) for reason in decision.reasons]
    if reasons and len(reasons) != len(victims):
        raise Nonsense(f"{len(reasons)} reasons for {len(victims)} victims; give one for each, or none")
    return EvictionDecision(victims, str(decision.reason), reasons)


def foreign_victims(blocks: Iterable[int]) -> Nonsense:
    return Nonsense(f"victims {sorted(blocks)} are unknown or active; choose among the candidates")


def orphaned(chosen: set[int], candidates: Candidates) -> str:
    """Return why victims may not be evicted without their children, or an empty text."""
    for block, parent in zip(candidates.block_ids.tolist(), candidates.parent_ids.tolist(), strict=True):
        if parent in chosen and block not in chosen:
            return f"victim {parent} still has the cached child {block}; choose both (see leaf_first)"
    return ""


def check_admission(answer: Any) -> bool:
    if not isinstance(answer, (bool, np.bool_)):
        raise Nonsense(f"admit answered {answer!r}; it must answer True or False")
    return bool(answer)


def check_schedule(answer: Any, view: StepView) -> ScheduleDecision | None:
    if answer is None:
        return None
    if not isinstance(answer, ScheduleDecision):
        raise Nonsense(f"schedule answered {answer!r}; it must answer a ScheduleDecision or None")
    ids = [request.request_id for request in view.requests]
    # Plain numbers from here on: what a plug-in hands over may be an array, or change later.
    order = ids if answer.order is None else [int(request) for request in islice(answer.order, len(ids) + 1)]
    if sorted(order) != sorted(ids):
        raise Nonsense(f"order {order} must name each of {ids} once")
    hold = [int(request) for request in islice(answer.hold, len(ids) + 1)]
    if len(hold) > len(ids):
        raise Nonsense(f"hold names more than the {len(ids)} requests of this step")
    if unknown := set(hold) - set(ids):
        raise Nonsense(f"hold names {sorted(unknown)}, which are not in this step")
    budget = None if answer.token_budget is None else index(answer.token_budget)
    if budget is not None and not budget >= 1:
        raise Nonsense(f"token budget {budget}; allowed are 1 to {view.token_budget}, or None")
    if answer.phase is not None and answer.phase not in (Phase.PREFILL, Phase.DECODE):
        raise Nonsense(f"phase {answer.phase!r}; allowed are Phase.PREFILL, Phase.DECODE, or None")
    chunks = {request: index(tokens) for request, tokens in _by_request(answer.chunk_tokens, "chunk_tokens", ids)}
    if any(tokens < 1 for tokens in chunks.values()):
        raise Nonsense(f"chunk_tokens {chunks}; a request gets at least 1 token")
    reasons = {request: str(reason) for request, reason in _by_request(answer.reasons, "reasons", ids)}
    drafts = {request: index(tokens) for request, tokens in _by_request(answer.draft_tokens, "draft_tokens", ids)}
    if any(tokens < 0 for tokens in drafts.values()):
        raise Nonsense(f"draft_tokens {drafts}; a request gets 0 guesses or more")
    phase = None if answer.phase is None else Phase(answer.phase)
    try:
        rules = read_rules(islice(answer.collectives, MOST_RULES)) if answer.collectives else ()
    except ValueError as error:
        raise Nonsense(f"collectives: {error}") from None
    return ScheduleDecision(order, frozenset(hold), budget, str(answer.reason), phase, chunks, reasons, drafts, rules)


def _by_request(given: Any, what: str, ids: list[int]) -> list[tuple[int, Any]]:
    if not given:
        return []
    rows = [(int(request), value) for request, value in islice(given.items(), len(ids) + 1)]
    if unknown := {request for request, _ in rows}.difference(ids):
        raise Nonsense(f"{what} names {sorted(unknown)}, which are not in this step")
    return rows
