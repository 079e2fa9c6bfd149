"""Messages of engines and the proxy of a prefill/decode group over control connections.

Every engine serves the control protocol (`comm_backend.control`) at an address of its own; the proxy and the decode engines
call. A request has one reply. A `transfer_id` is chosen by the proxy, anew for each request, and known to both engines: the 63
bits that LMDeploy's `MigrationRequest.remote_session_id` carries.
"""

from typing import Literal

from pydantic import Field

from sagellm.comm_backend.control import register
from sagellm.comm_backend.kv_transfer.layout import Model
from sagellm.comm_backend.kv_transfer.plan import TransferEndpoint

__all__ = [
    "ROLE_NUMBERS", "Capabilities", "Connect", "Done", "EngineFacts", "Fetch", "Held", "Hello", "Load", "PrefixChange",
    "Release", "Released", "StepCost", "Subscribe",
]  # fmt: skip

Role = Literal["prefill", "decode", "hybrid"]
ROLE_NUMBERS = {"hybrid": 1, "prefill": 2, "decode": 3}  # LMDeploy's `EngineRole`


class Hello(Model):
    """The caller's name: the first message of a connection. Reply: `EngineFacts` of who was called.

    Attributes:
        engine_id: the URL of its server; of the proxy, "proxy".
        facts: of an engine that calls; None: the proxy.
    """

    engine_id: str = Field(min_length=1)
    facts: "EngineFacts | None" = None


class Capabilities(Model):
    """Abilities of an engine on its machine, as it found them out; for the fields see `engines.base.CapabilityDescriptor`."""

    dtypes: tuple[str, ...] = ()
    quantization: tuple[str, ...] = ()
    kv_tiers: tuple[str, ...] = ()
    speculation: tuple[str, ...] = ()
    roles: tuple[Role, ...] = ("prefill", "decode", "hybrid")
    missing: dict[str, str] = Field(default_factory=dict)


class EngineFacts(Model):
    """One engine, as long as it lives.

    Attributes:
        instance: new at each start.
        model: its name. `weights`: a fingerprint of configuration and weights; engines that exchange KV have the same.
        channel: of KV transfers. `endpoints`: by rank.
        block_size: tokens. `num_blocks`: of the pool.
        token_bytes: of keys and values, all ranks together.
        timeout_s: it waits no longer for a prompt that another engine computes (`Fetch`); then it computes the prompt itself.
    """

    engine_id: str
    instance: str
    role: Role
    model: str
    weights: str
    channel: str
    endpoints: tuple[TransferEndpoint, ...]
    block_size: int
    num_blocks: int
    token_bytes: int
    timeout_s: float = Field(gt=0)
    capabilities: Capabilities = Capabilities()


class Connect(Model):
    """To a decode engine: connect to a prefill engine, now. Reply: `Done`, or an error that says what does not fit."""

    engine_id: str
    address: str = Field(description="host:port of its control server")


class Fetch(Model):
    """To a prefill engine: tell me when the prompt of this transfer is computed. Reply: `Held`. Errors: the prompt failed, or
    did not come within `timeout_s`. The caller sends `Release` in the end, also after an error."""

    transfer_id: int
    timeout_s: float = Field(gt=0, le=3600)


class Held(Model):
    """Keys and values of the first `num_tokens` tokens of a prompt lie in these blocks, and are kept until `Release`, or
    until the lease ends. `computed_at`: when they were complete, in Unix time. `tokens`: digest of the prompt's tokens, the
    same on both engines. `first_token`: that was drawn behind them, as the request asks for it; None if none was.
    `checksums`: by rank, where the engines check them."""

    transfer_id: int
    blocks: tuple[int, ...]
    num_tokens: int
    computed_at: float
    tokens: str
    first_token: int | None = None
    checksums: tuple[tuple[int, ...], ...] = ()


class Release(Model):
    """To a prefill engine: the blocks of this transfer are not needed any more, or never will be. Reply: `Released`."""

    transfer_id: int


class Released(Model):
    """`was_held`: the blocks were kept from `Held` until now, so that what was read from them is what they held."""

    was_held: bool


class Subscribe(Model):
    """From the proxy: send what is cached and how much there is to do. Reply: a snapshot, a `PrefixChange` with `is_all`.

    `PrefixChange` and `Load` follow as events at most every 0.1 s while anything changes. Ask again after a lost event.
    """


class PrefixChange(Model):
    """The fields of `sagellm.prefix_reuse.PrefixChanges`, which says what they mean."""

    after: int = Field(0, ge=0)
    sequence: int = Field(0, ge=0)
    stored: tuple[int, ...] = ()
    removed: tuple[int, ...] = ()
    is_all: bool = False
    num_left: int = Field(0, ge=0)


class StepCost(Model):
    """Cost of a step: `num_tokens` new tokens of `num_requests`, which had `num_context` before. A transfer has bytes."""

    kind: Literal["prefill", "decode", "transfer"]
    num_tokens: int = 0
    num_requests: int = 0
    num_context: int = 0
    num_bytes: int = 0
    seconds: float


class Load(Model):
    """`waiting_tokens`: of prompts that wait. `free_blocks`: those that the prefix cache would give up among them. `costs`: of
    steps since the last one, the latest 64 at most."""

    num_running: int
    num_waiting: int
    waiting_tokens: int
    free_blocks: int
    num_held: int = 0
    costs: tuple[StepCost, ...] = ()


class Done(Model):
    """Nothing more to say."""


Hello.model_rebuild()
register(Connect, Done, EngineFacts, Fetch, Held, Hello, Load, PrefixChange, Release, Released, Subscribe)
