"""Control messages between the processes of a group: authenticated, validated, with deadlines; and signed HTTP requests."""

from sagellm.comm_backend.control.client import connect
from sagellm.comm_backend.control.connection import ControlConnection
from sagellm.comm_backend.control.frames import MAX_FRAME_BYTES, PROTOCOL
from sagellm.comm_backend.control.keys import new_key, read_key
from sagellm.comm_backend.control.registry import register
from sagellm.comm_backend.control.server import ControlServer
from sagellm.comm_backend.control.signing import check_request, sign_request

__all__ = [
    "MAX_FRAME_BYTES", "PROTOCOL", "ControlConnection", "ControlServer", "check_request", "connect", "new_key", "read_key",
    "register", "sign_request",
]  # fmt: skip
