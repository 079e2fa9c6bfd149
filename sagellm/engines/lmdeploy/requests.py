"""Facts about a request that LMDeploy does not keep. `seq` is its `SchedulerSequence`, which carries it."""

import logging
import math
from functools import cache
from typing import Any

from pydantic import ValidationError

from sagellm.core.scheduling import ServiceLevel
from sagellm.core.service import EngineRequest

logger = logging.getLogger("sagellm")

NOTHING = EngineRequest()


def service_of(seq: Any) -> ServiceLevel:
    """Return the client's wishes; each request of a session gives its sequence other sampling parameters."""
    if getattr(seq, "sage_settings", None) is not seq.sampling_param:
        seq.sage_settings, asked = seq.sampling_param, _read(seq)
        seq.sage_service, seq.sage_parent = asked.level(), asked.parent
    return seq.sage_service


def _read(seq: Any) -> EngineRequest:
    """It came with the sampling parameters as JSON."""
    text = getattr(seq.sampling_param, "sage", None)
    if text is None:
        return NOTHING
    try:
        return EngineRequest.model_validate_json(text)
    except ValidationError as error:  # the server has checked it, so this is a mistake of ours
        logger.error("request %s goes on without its service level: %s", seq.session_id, error)
        return NOTHING


def parent_of(seq: Any) -> int | None:
    """Return the id of the request that this one is a branch of; None for others."""
    service_of(seq)
    return seq.sage_parent


def tenant_of(seq: Any) -> str:
    return service_of(seq).tenant_id


def release_caller(seq: Any) -> None:
    """A request leaves the engine: let a caller go that still waits for its tokens, with the answer that it was cancelled.

    LMDeploy answers no caller in two cases. A request may be cancelled in the turn of the loop that brings it: the cancellation
    is carried out first. Or a step that runs meanwhile may overwrite the answer. Such a caller held one of the instances of
    the engine process, until there was none left to cancel other requests with.
    """
    from lmdeploy.messages import ResponseType

    response = getattr(seq, "resp", None)
    if response is not None and response.type is not ResponseType.FINISH:
        response.__class__ = _cancelled()
        response.event.set()


@cache
def _cancelled() -> type:
    """Return a class of LMDeploy's responses that stay cancelled, whatever a step writes into them."""
    from lmdeploy.messages import ResponseType
    from lmdeploy.pytorch.engine.request import Response

    return type("CancelledResponse", (Response,), {"type": property(lambda _: ResponseType.CANCEL, lambda *_: None)})


def note_tokens(running: list[Any], cut: set[int], end_s: float) -> None:
    """A step of these requests ended then: all but those that were `cut` have got a token."""
    for seq in running:
        if seq.num_new_tokens and seq.seq_id not in cut:
            seq.sage_last_s = end_s
            if getattr(seq, "sage_first_s", math.inf) == math.inf:
                seq.sage_first_s = end_s
