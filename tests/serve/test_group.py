"""Tests of a server with a role: the requests that it takes from each sender, and what keeps it from starting."""

import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest

from benchmarks.processes import free_port
from sagellm.comm_backend.control import sign_request
from sagellm.core.config import PDConfig, PDHooks, SageConfig
from sagellm.core.errors import ConfigError, TransferError
from sagellm.serve import group
from sagellm.serve.group import GroupGate, Membership, join_group
from sagellm.serve.parameters import Refused
from sagellm.serve.routes import ROUTES

KEY = "a key of the tests"
PROXY = "http://127.0.0.1:1"


def gate(role, trusts_proxy=False):
    hooks = PDHooks(role=role, engine_id="http://127.0.0.1:1", key_file="key", channel="tcp", control_port=7)
    return GroupGate(Membership(hooks, KEY.encode(), PROXY, "tiny", SimpleNamespace(), trusts_proxy))


def scope(path, query=b"", method="POST"):
    return {"method": method, "path": path, "raw_path": path.encode(), "query_string": query}


def signed(path, body=b"", method="POST", key=KEY):
    return sign_request(key.encode(), method, path, body)


@pytest.fixture
def pd(tmp_path):
    file = tmp_path / "key"
    file.write_text(KEY)
    file.chmod(0o600)
    return {"role": "prefill", "proxy_url": PROXY, "key_file": file}


@pytest.fixture
def joined():
    """`join_group` on a CPU, and nothing left of it."""
    members = []

    def join(device="cpu", host="127.0.0.1", api_key=(), **pd):
        config = SageConfig(pd=PDConfig(**pd), host=host, port=free_port(), api_key=api_key)
        members.append(join_group(config, config.pd, device, "tiny"))
        return members[-1], config

    yield join
    for member in members:
        member.close()


class Refusing:
    def __init__(self, words, status):
        self._words, self._status = words, status

    def __enter__(self):
        return self

    def __exit__(self, kind, error, _):
        assert kind is Refused and self._words in str(error) and error.status == self._status, error
        return True


@pytest.mark.parametrize("field", group.FIELDS)
def test_fields_between_engines(field):
    raw = {field: {"protocol": 1} if field == "migration_request" else True}
    with Refusing(f"{field}: this server has no role", 400):
        GroupGate(None).check_body(raw, False)
    for role in ("prefill", "decode", "hybrid"):
        with Refusing(f"{field} is for the proxy of the group alone", 401):
            gate(role).check_body(raw, False)
    GroupGate(None).check_body({"prompt": "a", field: False}, False)


def test_who_works_for_clients():
    gate("decode").check_body({"prompt": "a"}, False)
    gate("hybrid").check_body({"prompt": "a"}, False)
    gate("prefill").check_body({"prompt": "a"}, True)
    with Refusing(f"prefill engine, which works for its proxy alone; send the request to {PROXY}", 403):
        gate("prefill").check_body({"prompt": "a"}, False)


WHOLE = {"protocol": 1, "remote_engine_id": "x", "remote_session_id": 5, "remote_token_id": 0, "remote_block_ids": []}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"remote_session_id": None}, "remote_session_id: Input should be a valid integer"),
        ({"remote_session_id": 1 << 63}, "remote_session_id is 9223372036854775808"),
        ({"remote_session_id": -1}, "remote_session_id is -1"),
        ({"protocol": 99}, "protocol: "),
        ({"remote_block_ids": "x"}, "remote_block_ids: "),
    ],
)
def test_a_migration_that_is_none(change, words):
    gate("decode").check_body({"migration_request": WHOLE}, True)
    with Refusing(words, 400):
        gate("decode").check_body({"migration_request": WHOLE | change}, True)
    with Refusing("migration_request.", 400):
        gate("decode").check_body({"migration_request": [1]}, True)


def test_signatures_are_of_this_request_and_count_once():
    path, body = "/v1/completions", b"{}"
    here = gate("decode")
    assert not here.check_signature(scope(path), {}, body)
    headers = signed(path, body)
    assert here.check_signature(scope(path), headers, body)
    with Refusing("was sent before", 401):
        here.check_signature(scope(path), headers, body)
    for changed in (scope("/v1/chat/completions"), scope(path, b"a=b"), scope(path, method="PUT")):
        with Refusing("signature of the request is wrong", 401):
            here.check_signature(changed, signed(path, body), body)
    with Refusing("signature of the request is wrong", 401):
        here.check_signature(scope(path), signed(path, body), b"{ }")
    with Refusing("signature of the request is wrong", 401):
        here.check_signature(scope(path), signed(path, body, key=KEY + "x"), body)
    assert here.check_signature(scope(path, b"a=%20b"), signed(path + "?a=%20b", body), body)
    assert not GroupGate(None).check_signature(scope(path), headers, body)  # means nothing here


def test_paths_of_the_group():
    for path in ("/distserve/p2p_connect", group.INFO):
        assert ROUTES[path].access == "group"
        with Refusing("is not signed", 401):
            gate("decode").check_path(path, {})
        with Refusing("this server has no role", 400):
            GroupGate(None).check_path(path, signed(path))
    assert gate("decode")._member.info == {
        "engine_id": "http://127.0.0.1:1", "role": "decode", "control": "127.0.0.1:7", "model": "tiny"
    }  # fmt: skip


def test_a_server_with_a_key_and_no_role(joined, pd):
    """It says who it is to the owner of the key, and takes no other part in a group."""
    member, config = joined(key_file=pd["key_file"])
    own = GroupGate(member)
    assert member.info | {"control": ""} == {
        "engine_id": f"http://127.0.0.1:{config.port}", "role": "hybrid", "control": "", "model": "tiny"
    }  # fmt: skip
    assert member.info["control"].startswith("127.0.0.1:") and not member.proxy_url
    own.check_path(group.INFO, signed(group.INFO))
    with Refusing("is not signed", 401):
        own.check_path(group.INFO, {})
    with Refusing("this server has no role", 400):
        own.check_path("/distserve/p2p_connect", signed("/distserve/p2p_connect"))
    for field in group.FIELDS:
        with Refusing(f"{field}: this server has no role", 400):
            own.check_body({field: WHOLE}, True)
    own.check_body({"prompt": "a"}, False)
    with pytest.raises(ConfigError, match="needs the address by which the manager reaches this server; got --host 0.0.0.0"):
        joined(key_file=pd["key_file"], host="0.0.0.0")
    with pytest.raises(ValueError, match="sot_workers and settings of a prefill/decode group exclude each other"):
        SageConfig(pd={"key_file": pd["key_file"]}, sot_workers=1)


def test_whom_a_server_trusts_that_trusts_lmdeploys_proxy():
    def says(which, client=("127.0.0.1", 5), **headers):
        return gate(*which).is_trusted(scope("/v1/completions") | {"client": client}, headers)

    asked = {"with_cache": True, "preserve_cache": True}
    for role in ("prefill", "decode", "hybrid"):
        here = role, True
        assert says(here) and says(here, ("::1", 5))
        assert not (says(here, ("192.0.2.1", 5)) or says(here, None) or says(here, origin="http://a.page"))
        assert not says((role, False))
        gate(*here).check_body(asked, False, True)
        gate(*here).check_path("/distserve/free_cache", {}, True)
        with Refusing("is not signed", 401):
            gate(*here).check_path(group.INFO, {}, True)
        with Refusing("is not signed", 401):
            gate(*here).check_body(asked, False)
    assert not GroupGate(None).is_trusted(scope("/") | {"client": ("127.0.0.1", 5)}, {})
    with Refusing("works for its proxy alone", 403):
        gate("prefill", True).check_body({"prompt": "a"}, False, True)
    assert gate("prefill", True).answer_of_refusal(True) == {"id": "0"}
    assert not (gate("prefill", True).answer_of_refusal(False) or gate("decode", True).answer_of_refusal(True))


def test_a_request_whose_prompt_no_engine_has():
    raw = {"prompt": "a", "migration_request": WHOLE}
    assert group.unsplit(raw) == raw
    assert group.unsplit({"prompt": "a", "migration_request": WHOLE | {"remote_session_id": 0}}) == {"prompt": "a"}
    assert group.unsplit({"prompt": "a"}) == {"prompt": "a"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"host": "0.0.0.0"}, "works on loopback alone; give --host 127.0.0.1 and --proxy-url http://127.0.0.1:PORT."),
        ({"proxy_url": "http://192.0.2.1:1"}, "works on loopback alone"),
        ({"api_key": ("sesame",)}, "LMDeploy's proxy sends no key to engines; leave --api-key out."),
    ],
)
def test_trust_that_is_refused_at_the_start(joined, pd, change, words):
    with pytest.raises(ConfigError, match=words):
        joined(**pd | change, trust_proxy=True)


def test_what_the_engine_process_is_told(joined, pd, capsys):
    member, config = joined(**pd, checksums=True, timeout_s=3, lease_s=4)
    hooks = member.hooks
    assert hooks.engine_id == f"http://127.0.0.1:{config.port}" and member.key == KEY.encode()
    assert (hooks.role, hooks.checksums, hooks.timeout_s, hooks.lease_s) == ("prefill", True, 3, 4)
    assert hooks.key_file.is_absolute() and hooks.control_host == "127.0.0.1"
    assert f"{PROXY} cannot be reached yet (Connection refused)" in capsys.readouterr().err
    with socket.create_server(("127.0.0.1", 0)) as there:
        joined(**pd | {"proxy_url": f"http://127.0.0.1:{there.getsockname()[1]}"})
    assert not capsys.readouterr().err


def test_the_port_is_kept_for_the_engine_process(joined, pd):
    member, _ = joined(**pd)
    port = member.hooks.control_port
    with pytest.raises(OSError, match="in use"), socket.socket() as other:  # as a program does that does not know of it
        other.bind(("127.0.0.1", port))
    code = (
        "import asyncio, sys\n"
        "from sagellm.comm_backend.control import ControlServer\n"
        "async def main():\n"
        "    server = ControlServer(b'', {})\n"
        "    print(await server.start('127.0.0.1', int(sys.argv[1])))\n"
        "    await server.close()\n"
        "asyncio.run(main())"
    )
    done = subprocess.run([sys.executable, "-c", code, str(port)], capture_output=True, text=True)
    assert done.stdout == f"127.0.0.1:{port}\n", done.stderr


def test_any_address_is_announced_as_one_that_others_reach(joined, pd):
    member, config = joined(**pd, host="0.0.0.0")
    assert member.hooks.engine_id == f"http://127.0.0.1:{config.port}" and member.hooks.control_host == "127.0.0.1"


def test_auto_is_the_same_for_all_engines_of_a_group(joined, pd, monkeypatch):
    assert joined(**pd)[0].hooks.channel == "shm"
    monkeypatch.setattr(group, "is_loopback", lambda address: False)
    far = SimpleNamespace(name="tcp", device_types=("cpu", "cuda"), missing=lambda: "")
    monkeypatch.setattr(group, "channel_names", lambda: ["shm", "tcp"])
    monkeypatch.setattr(group, "find_channel", {"tcp": far}.__getitem__)
    assert joined(**pd)[0].hooks.channel == "tcp"
    far.missing = lambda: "no network"
    with pytest.raises(ConfigError, match="auto: of tcp none works here for cpu; name one of shm, tcp"):
        joined(**pd)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"key_file": "/no/such/key"}, ConfigError, "cannot read the key file /no/such/key: No such file"),
        ({"proxy_url": "http://no-such-host.invalid:80"}, ConfigError, "--proxy-url: no host is known as no-such-host.invalid"),
        ({"channel": "pigeon"}, TransferError, "unknown KV channel 'pigeon'; known are: shm"),
        ({"channel": "shm", "device": "cuda"}, ConfigError, "--kv-channel shm moves blocks in memory of cpu; .* on cuda"),
        ({"host": "192.0.2.1"}, ConfigError, "cannot listen for control connections on 192.0.2.1"),
    ],
)
def test_what_cannot_work_is_said_at_the_start(joined, pd, change, error, words):
    with pytest.raises(error, match=words):
        joined(**pd | change)


def test_a_channel_that_lacks_something(joined, pd, monkeypatch):
    monkeypatch.setattr(group.find_channel("shm"), "missing", classmethod(lambda _: "it needs Linux."))
    with pytest.raises(ConfigError, match="--kv-channel shm does not work here: it needs Linux."):
        joined(**pd | {"channel": "shm"})


def test_a_control_port_that_is_in_use(joined, pd):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"127.0.0.1 port {port}: Address already in use. Choose another --pd-port."):
            joined(**pd | {"port": port})
