"""Mooncake's JSON lines: what is read, which block size, and every way in which a line can be malformed."""

import gzip
import hashlib
import json

import numpy as np
import pytest

from sagellm.core.errors import TraceError
from sagellm.replay.base import check_prefixes
from sagellm.replay.traces import read_trace
from tests.replay.made import trace_of

GOOD = [
    {"timestamp": 0, "input_length": 1000, "output_length": 5, "hash_ids": [0, 1]},
    {"timestamp": 1500, "input_length": 1100, "output_length": 6, "hash_ids": [0, 2, 3]},
    {"timestamp": 1500.5, "input_length": 512, "output_length": 0, "hash_ids": [2**64 - 1]},
]


def text(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


def with_line(**changes):
    """Three good lines, of which the second is changed; a value of ... takes the member away."""
    row = {key: value for key, value in {**GOOD[1], **changes}.items() if value is not ...}
    return text([GOOD[0], row, GOOD[2]])


@pytest.fixture
def write(tmp_path):
    def write(content, name="trace.jsonl"):
        path = tmp_path / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return write


def test_arrays(write):
    path = write(text(GOOD))
    trace = read_trace(path)
    assert (trace.num_requests, trace.num_accesses, trace.num_distinct_blocks, trace.block_size) == (3, 6, 5, 512)
    assert trace.times_s.tolist() == [0.0, 1.5, 1.5005] and trace.times_s.dtype == np.float64
    assert trace.input_tokens.tolist() == [1000, 1100, 512] and trace.output_tokens.tolist() == [5, 6, 0]
    assert trace.keys.tolist() == [0, 1, 0, 2, 3, 2**64 - 1] and trace.keys.dtype == np.uint64
    assert trace.offsets.tolist() == [0, 2, 5, 6] and trace.lines.tolist() == [1, 2, 3]
    assert trace.key_tokens().tolist() == [512, 488, 512, 512, 76, 512]
    assert trace.output_blocks().tolist() == [0, 0, 0]  # 5 and 6 tokens fit into the last blocks of their prompts
    assert trace.sha256 == hashlib.sha256(path.read_bytes()).hexdigest() and trace.num_skipped == 0
    with pytest.raises(ValueError, match="read-only"):
        trace.keys[0] = 1


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(gzip.compress(text(GOOD).encode()), id="gzip"),
        pytest.param(b"\xef\xbb\xbf" + text(GOOD).encode(), id="byte order mark"),
        pytest.param(text(GOOD).replace("\n", "\r\n").encode(), id="line ends of Windows"),
        pytest.param(("\n" + text(GOOD).replace("\n", "\n \n")).encode(), id="blank lines"),
        pytest.param(text(GOOD).rstrip("\n").encode(), id="no last line end"),
    ],
)
def test_the_same_requests_in_other_clothes(write, content):
    trace = read_trace(write(content))
    assert trace.keys.tolist() == [0, 1, 0, 2, 3, 2**64 - 1] and trace.num_skipped == 0


def test_block_size_is_what_most_lines_say(write):
    """Any line alone allows many sizes; the wrong one is named and does not decide."""
    rows = [{"timestamp": 0, "input_length": 6758, "output_length": 1, "hash_ids": list(range(14))},
            {"timestamp": 0, "input_length": 7236, "output_length": 1, "hash_ids": list(range(15))},
            {"timestamp": 0, "input_length": 7236, "output_length": 1, "hash_ids": list(range(9))}]  # fmt: skip
    path = write(text(rows))
    with pytest.raises(
        TraceError, match=r"line 3: 9 hash_ids for input_length 7236; with blocks of 512 tokens it takes 15"
    ):
        read_trace(path)
    trace = read_trace(path, skip_bad=True)
    assert (trace.block_size, trace.num_requests, trace.num_skipped) == (512, 2, 1)
    with pytest.raises(TraceError, match=r"line 1: 14 hash_ids.*blocks of 256 tokens it takes 27"):
        read_trace(path, block_size=256)


def test_block_size_that_is_no_power_of_two(write):
    """512 tokens in 2 blocks allow 256 to 511, 1,000 in 2 allow 500 to 999."""
    rows = [{"timestamp": 0, "input_length": 512, "output_length": 1, "hash_ids": [0, 1]},
            {"timestamp": 0, "input_length": 1000, "output_length": 1, "hash_ids": [0, 2]}]  # fmt: skip
    assert read_trace(write(text(rows))).block_size == 500


MALFORMED = {
    "not json": (text(GOOD[:1]) + "{oops}\n" + text(GOOD[2:]), "is not JSON"),
    "not an object": (text(GOOD[:1]) + "[1]\n" + text(GOOD[2:]), "holds a list"),
    "no ids": (with_line(hash_ids=...), "has no hash_ids; found 'input_length'"),
    "no time": (with_line(timestamp=...), "has no timestamp"),
    "no length": (with_line(input_length=...), "has no input_length"),
    "negative time": (with_line(timestamp=-1), "timestamp is -1"),
    "NaN": (with_line(timestamp=float("nan")), "timestamp is nan"),
    "infinite": (with_line(timestamp=float("inf")), "timestamp is inf"),
    "time in words": (with_line(timestamp="noon"), "timestamp is 'noon'; a number"),
    "endless time": (with_line(timestamp=10**400), "a finite number"),
    "float length": (with_line(input_length=1100.0), "input_length is 1100.0; an integer"),
    "boolean length": (with_line(input_length=True), "input_length is True; an integer"),
    "negative length": (with_line(output_length=-6), "output_length is -6; it must be 0 to 2147483647"),
    "huge length": (with_line(input_length=10**30), "it must be 0 to 2147483647"),
    "ids in words": (with_line(hash_ids="123"), "hash_ids is '123'; a list"),
    "an id in words": (with_line(hash_ids=[0, "a", 3]), "an entry of hash_ids is 'a'"),
    "a float id": (with_line(hash_ids=[0, 2.0, 3]), "an entry of hash_ids is 2.0"),
    "a negative id": (with_line(hash_ids=[0, -2, 3]), "an entry of hash_ids is -2"),
    "a huge id": (with_line(hash_ids=[0, 2**64, 3]), "it must be 0 to 18446744073709551615"),
    "digits without end": (text(GOOD[:1]) + '{"timestamp": ' + "9" * 5000 + "}\n" + text(GOOD[2:]), "is not usable JSON"),
    "brackets without end": (text(GOOD[:1]) + '{"a": ' + "[" * 100_000 + "\n" + text(GOOD[2:]), "not usable JSON|is not JSON"),
    "not UTF-8": (text(GOOD[:1]).encode() + b'{"a": "\xff"}\n' + text(GOOD[2:]).encode(), "is not UTF-8"),
    "time falls": (with_line(timestamp=0, input_length=1100).replace('"timestamp": 0, "input_length": 1000',
                   '"timestamp": 9, "input_length": 1000'), r"the timestamp falls \(0 s after 0.009 s\)"),
    "wrong count": (with_line(input_length=100), "3 hash_ids for input_length 100; with blocks of 512 tokens it takes 1"),
    "tenant": (with_line(tenant=5), "tenant is 5"),
    "a block under two parents": (with_line(hash_ids=[0, 2, 1]), r"overlapping ids: block 1 continues another prefix than in "
                                  "line 1"),
    "a block twice": (with_line(hash_ids=[0, 2, 2]), "block 2 is there twice in one request"),
    "a root further down": (with_line(hash_ids=[9, 0, 3]), "overlapping ids: block 0"),
}  # fmt: skip


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_lines(write, case):
    content, words = MALFORMED[case]
    path = write(content)
    with pytest.raises(TraceError, match=rf"trace\.jsonl, line 2: (.*{words})") as found:
        read_trace(path)
    assert "--skip-bad" in str(found.value)
    trace = read_trace(path, skip_bad=True)
    assert trace.num_skipped == 1 and trace.lines.tolist() == [1, 3]


def test_overlaps_have_no_meaning_for_objects(write):
    path = write(with_line(hash_ids=[0, 2, 1]))
    trace = read_trace(path, unique_parents=False)
    assert trace.num_requests == 3
    with pytest.raises(TraceError, match=r"line 2: overlapping ids: block 1 .* line 1; .*--semantics object"):
        check_prefixes(trace)
    check_prefixes(trace_of([[1, 2], [1, 3], [4]]))
    with pytest.raises(TraceError, match="line 2: overlapping ids: block 2"):
        check_prefixes(trace_of([[1, 2], [2]]))


def test_what_was_skipped_does_not_decide_what_overlaps(write):
    """Line 2 is left out whole, so line 3 may put its block 7 elsewhere."""
    rows = [[0, 1], [1, 7], [0, 7]]
    path = write(text({"timestamp": 0, "input_length": 1000, "output_length": 1, "hash_ids": ids} for ids in rows))
    assert read_trace(path, skip_bad=True).lines.tolist() == [1, 3]


def test_a_file_that_ends_in_the_middle_of_a_line(write):
    path = write(text(GOOD)[:-30])
    with pytest.raises(TraceError, match="line 3: the file ends in the middle of the line"):
        read_trace(path)
    assert read_trace(path, skip_bad=True).num_requests == 2


def test_a_gzip_file_that_ends_early(write):
    rows = [{**GOOD[1], "timestamp": number} for number in range(3000)]
    data = gzip.compress(text(rows).encode())
    path = write(data[: len(data) // 2], "trace.jsonl.gz")
    with pytest.raises(TraceError, match=r"line \d{3,4}: the gzip stream ends early"):
        read_trace(path)
    trace = read_trace(path, skip_bad=True)
    assert 0 < trace.num_requests < 3000 and trace.num_skipped == 1
    assert trace.times_s.tolist() == [number * 1e-3 for number in range(trace.num_requests)]


@pytest.mark.parametrize("place", [0.1, 0.3, 0.5, 0.7, 0.99])
@pytest.mark.parametrize("count", [3, 3000])
def test_a_flipped_bit_in_a_gzip_file(write, place, count):
    """The place of the damage is unknown, and most lines behind it still look right. Even --skip-bad keeps no line."""
    rows = [{**GOOD[1], "timestamp": number} for number in range(count)]
    data = bytearray(gzip.compress(text(rows).encode()))
    data[12 + int((len(data) - 12) * place)] ^= 4
    for skip_bad in (False, True):
        with pytest.raises(TraceError, match=r"trace.jsonl.gz: the gzip stream is damaged \("):
            read_trace(write(bytes(data), "trace.jsonl.gz"), skip_bad=skip_bad)


def test_what_follows_a_gzip_stream(write):
    data = gzip.compress(text(GOOD).encode())
    assert read_trace(write(gzip.compress(b"\n") + data, "trace.jsonl.gz")).num_requests == 3
    path = write(data + b"rest", "trace.jsonl.gz")
    with pytest.raises(TraceError, match="line 4: what follows the end of the gzip stream is no gzip"):
        read_trace(path)
    assert read_trace(path, skip_bad=True).num_requests == 3


@pytest.mark.parametrize("first", ["[", "[" + json.dumps(GOOD[0]) + "]", "[" + json.dumps(GOOD[0]) + ","])
def test_a_list_of_objects(write, first):
    with pytest.raises(TraceError, match="line 1: (begins|holds) a list. A trace has one JSON object a line"):
        read_trace(write(first + "\n"))


@pytest.mark.parametrize(
    ("content", "words"),
    [("", "is empty"), ("{}".encode("utf-16-le"), "UTF-16"), (gzip.compress(text(GOOD).encode(), mtime=0)[:24], "ends early"),
     ("\n \n", "is empty"), (b"\xff\xfe{\0}\0", "UTF-16"), ("hello\n", "neither JSON nor CSV"),
     (gzip.compress(b"", mtime=0), "is empty")],
)  # fmt: skip
def test_files_that_are_no_traces(write, content, words):
    with pytest.raises(TraceError, match=words):
        read_trace(write(content))


def test_nothing_left(write):
    with pytest.raises(
        TraceError, match=r"holds no requests; 1 lines were skipped, the first: line 1: is not JSON[^.]*\. Give"
    ):
        read_trace(write("{oops}\n"), skip_bad=True)


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(TraceError, match=r"no such file. Give a trace file, or a generator"):
        read_trace(tmp_path / "absent.jsonl")
    with pytest.raises(TraceError, match="cannot be read: Is a directory"):
        read_trace(tmp_path)


def test_a_trace_that_says_no_block_size(write):
    path = write(text([{"timestamp": 0, "input_length": 0, "output_length": 3, "hash_ids": []}]))
    with pytest.raises(TraceError, match="give --block-size"):
        read_trace(path)
    assert read_trace(path, block_size=16).num_accesses == 0


def test_tenants(write):
    trace = read_trace(write(with_line(tenant="red")))
    assert trace.tenants == ("", "red", "")
