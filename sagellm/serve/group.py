"""A server as one of a prefill/decode group: what it needs at its start, and what it asks of those who call it.

One with a key and without a role is in no group: it tells the owner of the key what it has cached.
"""

import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from sagellm.comm_backend.control import check_request, read_key
from sagellm.comm_backend.control.addresses import join_address
from sagellm.comm_backend.control.signing import SIGNATURE
from sagellm.comm_backend.kv_transfer.registry import channel_names, find_channel
from sagellm.core.config import PDConfig, PDHooks, SageConfig
from sagellm.core.errors import ConfigError, PeerError
from sagellm.core.ports import is_loopback
from sagellm.serve.parameters import Refused

__all__ = ["FIELDS", "INFO", "GroupGate", "Membership", "join_group"]

INFO = "/sage/pd/info"
FIELDS = ("migration_request", "with_cache", "preserve_cache")  # of LMDeploy, between engines and their proxy
NO_SESSION = 0  # of a prompt that no prefill engine has; the first session of a server is 1
ANY_ADDRESS = ("0.0.0.0", "::")
NO_ROLE = "this server has no role in a prefill/decode group; start it with --role prefill, decode or hybrid"
LOOK_S = 2.0  # for a first look at the proxy
HTTP_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True)
class Membership:
    """`hooks`: for the engine process. `port_holder` keeps the port of its control connections until it takes it.
    `proxy_url`: empty without a role. `trusts_proxy`: requests of this host need no signature."""

    hooks: PDHooks
    key: bytes
    proxy_url: str
    model: str
    port_holder: socket.socket
    trusts_proxy: bool = False

    @property
    def info(self) -> dict[str, str]:
        control = join_address(self.hooks.control_host, self.hooks.control_port)
        role = self.hooks.role or "hybrid"
        return {"engine_id": self.hooks.engine_id, "role": role, "control": control, "model": self.model}

    def close(self) -> None:
        self.port_holder.close()


def join_group(config: SageConfig, pd: PDConfig, device: str, model: str) -> Membership:
    """Facts that are known before a model is loaded. `pd`: that of `config`. `model`: its name.

    Says on standard error where the proxy does not answer: it may be started later.

    Raises:
        ConfigError: a key file that cannot be used, a port in use, a proxy whose name is unknown, a channel that does not work.
            Or trust in a proxy that is not on loopback, or no address without a role.
        TransferError: an unknown channel.
    """
    key = read_key(pd.key_file)
    if pd.role is None:
        if config.host in ANY_ADDRESS:
            raise ConfigError(
                f"--pd-key-file without --role needs the address by which the manager reaches this server; got --host "
                f"{config.host}. Give one address of this machine."
            )
        holder = _hold_port(config.host, pd.port)
        hooks = PDHooks(
            role=None, engine_id=f"http://{join_address(config.host, config.port)}", key_file=pd.key_file.resolve(),
            control_host=config.host, control_port=holder.getsockname()[1],
        )  # fmt: skip
        return Membership(hooks, key, "", model, holder)
    proxy = urlsplit(pd.proxy_url)
    addresses = _addresses(proxy.hostname, proxy.port or HTTP_PORTS[proxy.scheme])
    if pd.trust_proxy:
        _check_trust(config, addresses)
    channel = _channel(pd, device, is_one_host=all(is_loopback(address[4][0]) for address in addresses))
    # Others cannot connect to "any address"; the one from which the proxy is reached is one that they can.
    host = config.host if config.host not in ANY_ADDRESS else _own_address(addresses[0])
    holder = _hold_port(host, pd.port)
    hooks = PDHooks(
        role=pd.role, engine_id=f"http://{join_address(host, config.port)}", key_file=pd.key_file.resolve(), channel=channel,
        channel_options=pd.channel_options, checksums=pd.checksums, timeout_s=pd.timeout_s, lease_s=pd.lease_s,
        control_host=host, control_port=holder.getsockname()[1],
    )  # fmt: skip
    _look_for_proxy(pd.proxy_url, addresses)
    return Membership(hooks, key, pd.proxy_url, model, holder, pd.trust_proxy)


class GroupGate:
    """Which requests a server takes from whom. `member`: None where it has no role."""

    def __init__(self, member: Membership | None) -> None:
        self._member = member

    @property
    def _has_role(self) -> bool:
        return self._member is not None and self._member.hooks.role is not None

    def is_trusted(self, scope: Mapping[str, Any], headers: Mapping[str, str]) -> bool:
        """Whether a request is taken as LMDeploy's proxy's without a signature: it comes from this host, and from no page that
        a browser on it shows."""
        if self._member is None or not self._member.trusts_proxy:
            return False
        client = scope.get("client")
        return client is not None and is_loopback(client[0]) and "origin" not in headers

    def check_path(self, path: str, headers: Mapping[str, str], is_trusted: bool = False) -> None:
        """Before the body is read. Raises Refused: the path needs a signature, or this server does not have it."""
        if not self._has_role and (self._member is None or path != INFO):
            raise Refused(f"{path}: {NO_ROLE}.")
        if SIGNATURE not in headers and not (is_trusted and path != INFO):
            raise Refused(f"{path} is for the group alone: the request is not signed with its key.", 401)

    def check_signature(self, scope: Mapping[str, Any], headers: Mapping[str, str], body: bytes) -> bool:
        """Whether there is one, which is right. Raises Refused: it is wrong, too old, or was used before."""
        if self._member is None or SIGNATURE not in headers:
            return False
        path = (scope.get("raw_path") or scope["path"].encode()).decode("latin-1")
        if scope["query_string"]:
            path += f"?{scope['query_string'].decode('latin-1')}"
        try:
            check_request(self._member.key, scope["method"], path, body, headers)
        except PeerError as error:
            raise Refused(str(error), 401) from None
        return True

    def check_body(self, raw: Mapping[str, Any], is_signed: bool, is_trusted: bool = False) -> None:
        """Raises Refused: fields that only a group's proxy may send, or requests that only it may."""
        given = [name for name in FIELDS if raw.get(name)]
        if self._member is None or not self._has_role:
            if given:
                raise Refused(f"{given[0]}: {NO_ROLE}, or leave the field out.")
            return
        if given and not (is_signed or is_trusted):
            raise Refused(f"{given[0]} is for the proxy of the group alone: the request is not signed with its key.", 401)
        if self._member.hooks.role == "prefill" and not (is_signed or (is_trusted and given)):
            raise Refused(
                f"this is a prefill engine, which works for its proxy alone; send the request to {self._member.proxy_url}.", 403
            )
        if raw.get("migration_request"):
            _check_migration(raw["migration_request"])

    def answer_of_refusal(self, is_trusted: bool) -> dict[str, str]:
        """Return further fields of a refusal. LMDeploy's proxy takes any answer of a prefill engine for a computed
        prompt, and fails if it has no id. With this id it goes on to the decode engine, which refuses the request too,
        or answers it alone."""
        is_prefill = self._member is not None and self._member.hooks.role == "prefill"
        return {"id": str(NO_SESSION)} if is_trusted and is_prefill else {}


def unsplit(raw: dict[str, Any]) -> dict[str, Any]:
    """A request of LMDeploy's proxy, without its `migration_request` where no prefill engine has its prompt."""
    asked = raw.get("migration_request")
    if not asked or asked["remote_session_id"] != NO_SESSION:
        return raw
    return {name: value for name, value in raw.items() if name != "migration_request"}


def _check_migration(value: Any) -> None:
    """Raises Refused: LMDeploy would fail over it."""
    from lmdeploy.pytorch.disagg.conn.protocol import MigrationRequest
    from pydantic import ValidationError

    try:
        session = MigrationRequest.model_validate(value).remote_session_id
    except ValidationError as error:
        item = error.errors()[0]
        raise Refused(f"migration_request.{'.'.join(map(str, item['loc']))}: {item['msg']}.") from None
    if not 0 <= session < 1 << 63:
        raise Refused(f"migration_request.remote_session_id is {session}; allowed are 0 to 2**63 - 1.")


def _addresses(host: str, port: int) -> list[tuple]:
    try:
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        words = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"--proxy-url: no host is known as {host} ({words}).") from None


def _own_address(remote: tuple) -> str:
    with socket.socket(remote[0], socket.SOCK_DGRAM) as probe:  # nothing is sent
        try:
            probe.connect(remote[4])
        except OSError as error:
            raise ConfigError(
                f"no way leads to the proxy at {remote[4][0]} ({error.strerror}); give as --host the address of this machine "
                "that the others are to use."
            ) from None
        return probe.getsockname()[0]


def _channel(pd: PDConfig, device: str, is_one_host: bool) -> str:
    """The name of a channel that works here. `auto` looks at what all engines of a group share: they must come to the same."""
    kind_of_device = device.partition(":")[0]
    if pd.channel == "auto":
        wanted = ("shm", "tcp") if is_one_host else ("tcp",)
        for name in (name for name in wanted if name in channel_names()):
            kind = find_channel(name)
            if kind_of_device in kind.device_types and not kind.missing():
                return name
        raise ConfigError(
            f"--kv-channel auto: of {', '.join(wanted)} none works here for {device}; name one of {', '.join(channel_names())}."
        )
    kind = find_channel(pd.channel)
    if missing := kind.missing():
        raise ConfigError(f"--kv-channel {pd.channel} does not work here: {missing}")
    if kind_of_device not in kind.device_types:
        raise ConfigError(
            f"--kv-channel {pd.channel} moves blocks in memory of {', '.join(kind.device_types)}; this engine runs on {device}."
        )
    return pd.channel if ":" in pd.channel else kind.name


def _hold_port(host: str, port: int) -> socket.socket:
    """Bind a port without listening. On Linux another socket that allows it, as asyncio's do, may listen there, and no
    other process gets the port by chance."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        holder = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"--host {host} is no address of this machine ({error.strerror}).") from None
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        holder.bind(address)
    except OSError as error:
        holder.close()
        raise ConfigError(
            f"cannot listen for control connections on {host} port {port}: {error.strerror}. Choose another --pd-port."
        ) from None
    return holder


def _check_trust(config: SageConfig, of_proxy: list[tuple]) -> None:
    """Raises ConfigError: other hosts could send unsigned requests, or the proxy would be refused."""
    try:
        own = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"--host {config.host} is no address of this machine ({error.strerror}).") from None
    if not all(is_loopback(address[4][0]) for address in own + of_proxy):
        raise ConfigError(
            "--pd-trust-proxy takes unsigned requests, so it works on loopback alone; give --host 127.0.0.1 and "
            "--proxy-url http://127.0.0.1:PORT."
        )
    if config.api_key:
        raise ConfigError("--pd-trust-proxy with --api-key: LMDeploy's proxy sends no key to engines; leave --api-key out.")


def _look_for_proxy(url: str, addresses: list[tuple]) -> None:
    host, port = addresses[0][4][:2]
    try:
        socket.create_connection((host, port), timeout=LOOK_S).close()
    except OSError as error:
        words = error.strerror or "no answer"
        print(
            f"The proxy at {url} cannot be reached yet ({words}); this engine looks for it again when its model is loaded, and "
            "from then on every two seconds.",
            file=sys.stderr,
            flush=True,
        )
