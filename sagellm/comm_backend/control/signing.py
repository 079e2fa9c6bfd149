"""HTTP requests within a group, signed with its key."""

import hashlib
import hmac
import re
import secrets
import time
from collections import OrderedDict
from collections.abc import Mapping
from threading import Lock

from sagellm.core.errors import PeerError

__all__ = ["SIGNATURE", "WINDOW_S", "RequestLog", "check_request", "sign_request"]

SIGNATURE = "x-sage-signature"
WINDOW_S = 30.0  # that clocks may differ, and a request may take
_FORM = re.compile(r"v1 ([0-9]{1,20}) ([0-9a-f]{32}) ([0-9a-f]{64})")


class RequestLog:
    """Which signed requests were taken, so that none is taken twice. Only requests with a valid signature get into it.

    `max_requests` bounds it: beyond that many within a minute, requests are refused, since to forget one would let it pass
    again. An entry takes some 200 bytes.
    """

    def __init__(self, max_requests: int = 500_000) -> None:
        self._until: OrderedDict[str, float] = OrderedDict()  # nonce -> when it may be forgotten, in that order
        self._max_requests = max_requests
        self._lock = Lock()

    def add(self, nonce: str, now_s: float) -> None:
        """Raises:
        PeerError: it was there already, or there are too many.
        """
        with self._lock:
            while self._until and next(iter(self._until.values())) < now_s:
                self._until.popitem(last=False)
            if nonce in self._until:
                raise PeerError("this signed request was sent before; sign each request anew.")
            if len(self._until) >= self._max_requests:
                raise PeerError(f"more than {self._max_requests} signed requests within a minute; send fewer.")
            # A signature may come from a clock that is WINDOW_S ahead, and is good until WINDOW_S after that.
            self._until[nonce] = now_s + 2 * WINDOW_S


_TAKEN = RequestLog()


def sign_request(key: bytes, method: str, path: str, body: bytes = b"") -> dict[str, str]:
    """Headers to add to a request. `path` as it is sent: with the query, percent-encoded, without scheme and host."""
    stamp, nonce = str(time.time_ns() // 1_000_000), secrets.token_hex(16)
    return {SIGNATURE: f"v1 {stamp} {nonce} {_digest(key, method, path, body, stamp, nonce)}"}


def check_request(
    key: bytes, method: str, path: str, body: bytes, headers: Mapping[str, str], log: RequestLog = _TAKEN
) -> None:
    """Check a received request; each request passes once in `log`, by default the process's own.

    Raises:
        PeerError: the signature is missing, wrong, more than 30 s old or ahead, or was seen before.
    """
    given = next((value for name, value in headers.items() if name.lower() == SIGNATURE), None)
    if given is None:
        raise PeerError(f"the request is not signed: it lacks the header {SIGNATURE}.")
    parts = _FORM.fullmatch(given)
    if parts is None:
        raise PeerError(f"the header {SIGNATURE} does not have the form of a signature.")
    stamp, nonce, digest = parts.groups()
    if not hmac.compare_digest(digest, _digest(key, method, path, body, stamp, nonce)):
        raise PeerError("the signature of the request is wrong: another key, or the request was changed.")
    now_s = time.time()
    age_s = now_s - int(stamp) / 1000
    if abs(age_s) > WINDOW_S:
        raise PeerError(
            f"the request was signed {abs(age_s):.0f} s {'ago' if age_s > 0 else 'in the future'}; allowed are {WINDOW_S:g} s. "
            "Set the clocks of both hosts."
        )
    log.add(nonce, now_s)


def _digest(key: bytes, method: str, path: str, body: bytes, stamp: str, nonce: str) -> str:
    fields = (b"sage-request 1", method.upper().encode(), path.encode(), stamp.encode(), nonce.encode())
    text = b"\n".join((*fields, hashlib.sha256(body).hexdigest().encode()))  # none of the others has line ends
    return hmac.new(key, text, hashlib.sha256).hexdigest()
