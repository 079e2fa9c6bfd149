"""CSV files of lengths: the names of columns, dates, and what requests share."""

import pytest

from sagellm.core.errors import TraceError
from sagellm.replay.base import check_prefixes
from sagellm.replay.traces import read_trace


def read(tmp_path, text, **options):
    path = tmp_path / "trace.csv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_trace(path, **{"block_size": 10, **options})


def rows_of(trace):
    return [trace.keys[start:end].tolist() for start, end in zip(trace.offsets, trace.offsets[1:], strict=False)]


def test_blocks_of_ones_own(tmp_path):
    trace = read(tmp_path, "timestamp,input_length,output_length\n0.5,25,3\n1,10,0\n")
    assert [len(row) for row in rows_of(trace)] == [3, 1] and trace.num_distinct_blocks == 4
    assert trace.times_s.tolist() == [0.5, 1.0] and trace.output_tokens.tolist() == [3, 0]
    assert read(tmp_path, "timestamp,input_length\n0,129\n", block_size=None).block_size == 64


@pytest.mark.parametrize(
    "text",
    [
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,ChatGPT,472,18,490,Conversation log\n",
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,472,18\n",
        "timestamp_ms;x,input_tokens,output_tokens\n".replace(";x", "") + "5000,472,18\n",
        "time,prompt_tokens,completion_tokens\n1700000000,472.0,18\n",
    ],
)
def test_names_of_others(tmp_path, text):
    trace = read(tmp_path, text)
    assert (
        trace.input_tokens.tolist() == [472] and trace.output_tokens.tolist() == [18] and trace.times_s[0] in (0.0, 5.0)
    )


def test_dates(tmp_path):
    trace = read(tmp_path, "timestamp,input_length\n2024-05-10 00:00:00.1234567,5\n2024-05-10T00:00:01.5+00:00,5\n")
    assert trace.times_s.tolist() == pytest.approx([0, 1.3765433], abs=1e-6)


def test_a_conversation_goes_on(tmp_path):
    """25 tokens, then 47 that begin with them; then the first 25 again. The partly filled block is a new one each time."""
    trace = read(tmp_path, "timestamp,session,input_length\n0,a,25\n1,b,25\n2,a,47\n3,a,25\n4,,25\n")
    first, other, longer, again, alone = rows_of(trace)
    assert longer[:2] == first[:2] == again[:2] and len(longer) == 5
    assert len({first[2], longer[2], again[2]}) == 3
    assert not set(other) & set(first) and not set(alone) & set(first)
    check_prefixes(trace)


def test_common_beginnings(tmp_path):
    trace = read(
        tmp_path,
        "timestamp,prefix_id,prefix_length,session,input_length\n0,p,25,,40\n1,p,15,,40\n2,q,25,,40\n3,p,35,,40\n4,p,25,s,40\n5,p,25,s,60\n",
    )
    first, shorter, other, longer, begun, gone_on = rows_of(trace)
    assert first[:2] == longer[:2] and first[2] != longer[2] and shorter[0] == first[0] and shorter[1] != first[1]
    assert not set(other) & set(first)
    assert begun[:2] == first[:2] and gone_on[:4] == begun[:4] and len(gone_on) == 6
    check_prefixes(trace)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("1,many,3", "input length is 'many'; a number"),
        ("1,2.5,3", "input length is 2.5; an integer"),
        ("1,nan,3", "input length is nan; a finite number"),
        ("1,-5,3", "input length is -5"),
        ("1,99999999999,3", "an integer from 0 to 2147483647"),
        ("1,5", "has 2 columns; the header has 3"),
        ("noon,5,3", "the timestamp is 'noon'; a number"),
        ("2024-99-10,5,3", "the timestamp is '2024-99-10'; seconds or a date"),
        ("0,5,3", "the timestamp falls"),
        (",5,3", "the timestamp is ''"),
    ],
)
def test_malformed_lines(tmp_path, line, words):
    text = f"timestamp,input_length,output_length\n0.5,5,5\n{line}\n2,5,5\n"
    with pytest.raises(TraceError, match=rf"trace\.csv, line 3: .*{words}"):
        read(tmp_path, text)
    trace = read(tmp_path, text, skip_bad=True)
    assert trace.num_requests == 2 and trace.num_skipped == 1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a,b\n1,2\n", "line 1: no column for time; found 'a', 'b'. Name one of: timestamp"),
        ("timestamp,b\n1,2\n", "line 1: no column for input"),
        ("timestamp,input_length\n", "holds no requests"),
        (
            "timestamp,prefix_id,prefix_length,input_length\n0,p,9,5\n",
            "line 2: prefix_length 9 is above the input length 5",
        ),
        (
            "timestamp,prefix_id,prefix_length,session,input_length\n0,p,3,s,5\n1,q,3,s,5\n",
            "line 3: session 's' has prefix 'q'",
        ),
    ],
)
def test_files_that_cannot_be_used(tmp_path, text, words):
    with pytest.raises(TraceError, match=words):
        read(tmp_path, text)


def test_a_line_that_is_not_utf8(tmp_path):
    """Two names that differ in such a byte alone are two sessions, and not one of replacement characters."""
    text = b"timestamp,input_length,session\n0,128,caf\xe9\n1,128,caf\xe8\n2,64,tea\n"
    with pytest.raises(TraceError, match="line 2: is not UTF-8 text"):
        read(tmp_path, text)
    trace = read(tmp_path, text, skip_bad=True)
    assert trace.num_requests == 1 and trace.num_skipped == 2


def test_a_stray_quote_takes_its_own_line_only(tmp_path):
    text = 'timestamp,input_length,session\n0,64,"a\n1,64,"b"\n2,64,c\n'
    with pytest.raises(TraceError, match="line 2: is not CSV"):
        read(tmp_path, text)
    assert read(tmp_path, text, skip_bad=True).lines.tolist() == [3, 4]


@pytest.mark.parametrize("count", ["1_000", "1_0.0"])
def test_underscores_are_no_numbers(tmp_path, count):
    with pytest.raises(TraceError, match="a number was expected"):
        read(tmp_path, f"timestamp,input_length\n0,{count}\n")


def test_too_many_blocks_are_refused_before_they_are_made(tmp_path):
    text = "timestamp,input_length\n0,64\n" + "1,2147483647\n" * 3
    for skip_bad in (False, True):
        with pytest.raises(TraceError, match="line 3: with its 33554432 blocks the trace has more than 20000000"):
            read(tmp_path, text, skip_bad=skip_bad, block_size=64)
    assert read(tmp_path, text, block_size=1 << 20).num_accesses == 1 + 3 * 2048


def test_nothing_of_a_file_steers_the_terminal(tmp_path):
    with pytest.raises(TraceError) as found:
        read(tmp_path, b"\x1b[31mred," + b"x" * 500 + b"\n1,2\n")
    assert "\x1b" not in str(found.value) and len(str(found.value)) < 400
