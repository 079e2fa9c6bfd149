"""Key files and signed HTTP requests."""

import os

import pytest

from sagellm.comm_backend.control import check_request, new_key, read_key, sign_request, signing
from sagellm.comm_backend.control.signing import RequestLog
from sagellm.core.errors import ConfigError, PeerError

KEY = b"a key of the tests"
ARGUMENTS = (KEY, "POST", "/v1/completions?a=b", b'{"prompt": "x"}')


def key_file(folder, content, mode=0o600):
    path = folder / "key"
    path.write_bytes(content)
    path.chmod(mode)
    return path


def test_a_key_is_the_text_of_its_file(tmp_path):
    key = new_key()
    assert len(key) == 64 and key != new_key()
    assert read_key(key_file(tmp_path, key + b"\n")) == key
    assert read_key(key_file(tmp_path, b"x" * 16, 0o400)) == b"x" * 16


@pytest.mark.parametrize(
    ("content", "mode", "words"),
    [
        (b"x" * 15 + b"\n", 0o600, "holds 15 bytes; a key has 16 to 4096"),
        (b"", 0o600, "holds 0 bytes"),
        (b"x" * 5000, 0o600, "holds more than 4096 bytes"),
        (b"\xff" * 20, 0o600, "does not hold text"),
        (b"x" * 20, 0o640, "has mode 640, so that others than its owner may use it; run chmod 600"),
        (b"x" * 20, 0o602, "has mode 602"),
    ],
)
def test_a_key_file_that_cannot_be_used(content, mode, words, tmp_path):
    with pytest.raises(ConfigError, match=words):
        read_key(key_file(tmp_path, content, mode))


def test_a_key_file_that_is_none(tmp_path):
    with pytest.raises(ConfigError, match="cannot read the key file .*none: No such file"):
        read_key(tmp_path / "none")
    os.mkfifo(tmp_path / "pipe", 0o600)
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(ConfigError, match="is not a regular file"):
            read_key(path)


def test_a_signed_request_passes_once():
    log = RequestLog()
    headers = sign_request(*ARGUMENTS)
    check_request(*ARGUMENTS, {"Host": "x", **{name.title(): value for name, value in headers.items()}}, log)
    with pytest.raises(PeerError, match="was sent before"):
        check_request(*ARGUMENTS, headers, log)
    check_request(*ARGUMENTS, sign_request(*ARGUMENTS), log)


@pytest.mark.parametrize("place", range(4))
def test_a_changed_request_does_not_pass(place):
    changed = list(ARGUMENTS)
    changed[place] = [b"another key than that", "GET", "/v1/completions?a=c", b'{"prompt": "y"}'][place]
    with pytest.raises(PeerError, match="signature of the request is wrong"):
        check_request(*changed, sign_request(*ARGUMENTS))


def test_parts_cannot_be_moved_between_fields():
    headers = sign_request(KEY, "GET", "/a", b"")
    _, stamp, nonce, digest = headers[signing.SIGNATURE].split()
    for forged in (f"v1 {int(stamp) + 1} {nonce} {digest}", f"v1 {stamp} {'0' * 32} {digest}"):
        with pytest.raises(PeerError, match="is wrong"):
            check_request(KEY, "GET", "/a", b"", {signing.SIGNATURE: forged})


@pytest.mark.parametrize("value", ["", "v1", "v2 1 " + "0" * 32 + " " + "0" * 64, "v1 -1 " + "0" * 32 + " " + "0" * 64, "\xff"])
def test_a_header_that_is_no_signature(value):
    with pytest.raises(PeerError, match="does not have the form of a signature"):
        check_request(*ARGUMENTS, {signing.SIGNATURE: value})
    with pytest.raises(PeerError, match="not signed: it lacks the header x-sage-signature"):
        check_request(*ARGUMENTS, {})


@pytest.mark.parametrize(("age_s", "words"), [(31, "31 s ago"), (-31, "31 s in the future"), (29, ""), (-29, "")])
def test_a_signature_has_its_time(age_s, words, monkeypatch):
    headers = sign_request(*ARGUMENTS)
    stamp_s = int(headers[signing.SIGNATURE].split()[1]) / 1000
    monkeypatch.setattr(signing.time, "time", lambda: stamp_s + age_s)
    if not words:
        check_request(*ARGUMENTS, headers)
        return
    with pytest.raises(PeerError, match=words):
        check_request(*ARGUMENTS, headers)


def test_the_log_is_bounded_and_forgets_what_is_too_old_to_pass():
    log = RequestLog(max_requests=3)
    for number in range(3):
        log.add(str(number), now_s=100 + number)
    with pytest.raises(PeerError, match="more than 3 signed requests"):
        log.add("3", now_s=103)
    with pytest.raises(PeerError, match="sent before"):
        log.add("0", now_s=160)  # signed 30 s ahead, it would still pass
    log.add("3", now_s=160.1)
    assert len(log._until) == 3


def test_strangers_fill_no_memory():
    log = RequestLog()
    for _ in range(10):
        with pytest.raises(PeerError):
            check_request(*ARGUMENTS, sign_request(b"another key than that", *ARGUMENTS[1:]), log)
    assert not log._until
