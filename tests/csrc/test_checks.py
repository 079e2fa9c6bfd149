"""The native library under sanitizers and fuzzing, by the documented command, `sagellm/csrc/check.sh`.

The fuzz target runs for SAGELLM_FUZZ_SECONDS (10) beside the other tests here; the last one waits for its end. A minute of it
for each compiler is a job of its own (.github/workflows/native.yml).
"""

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CHECK = str(ROOT / "sagellm/csrc/check.sh")
SECONDS = int(os.environ.get("SAGELLM_FUZZ_SECONDS", "10"))
CANNOT = 77
# The driver for g++ and libFuzzer, which clang brings, say it differently.
KEPT = re.compile(r"^(?:failing input, .*: |.*Test unit written to )(.*)$", re.MULTILINE)
RUNS = re.compile(r"^(?:no finding: (\d+) inputs|Done (\d+) runs)", re.MULTILINE)

# The builds take minutes; CI runs them behind all other tests.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400 + SECONDS)]


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([CHECK, *arguments], env=os.environ | variables, capture_output=True, text=True)


def check(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    done = run(*arguments, **variables)
    if done.returncode == CANNOT:
        pytest.skip(done.stderr.strip().splitlines()[-1])
    return done


@pytest.fixture(scope="module")
def address() -> subprocess.CompletedProcess[str]:
    """The first run of all, which builds what the fuzz target needs."""
    return run("address")


@pytest.fixture(scope="module", autouse=True)
def fuzzing(address: subprocess.CompletedProcess[str]) -> Iterator["subprocess.Popen[str]"]:
    """Run `check.sh fuzz` in the background, with stdout and stderr in one. `address` has built what fuzzing needs. Otherwise
    all tests would wait for a build that runs only when no other process does."""
    process = subprocess.Popen(
        ["nice", "-n", "19", CHECK, "fuzz", str(SECONDS)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    with process:
        yield process
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.parametrize("kind", ["address", "thread"])
def test_native_tests_pass_under_sanitizers(kind: str, address: subprocess.CompletedProcess[str]) -> None:
    done = check(kind) if kind != "address" or address.returncode == CANNOT else address
    assert done.returncode == 0, done.stderr[-4000:]
    passed = set(re.findall(r"^(\w+): passed", done.stdout, re.MULTILINE))
    several = {"threads", "hook_table", "port_questions", "port_notices", "shm_group", "team", "decoder", "turbomind"}
    single = {"functional", "block_cache", "policies", "copy_pieces", "kv_strides", "suffix_tree", "abi"}
    assert passed == (several if kind == "thread" else several | single)


@pytest.mark.parametrize(
    ("kind", "fault", "words"),
    [
        ("address", "overrun", "ERROR: AddressSanitizer"),
        ("thread", "race", "WARNING: ThreadSanitizer: data race"),
    ],
)
def test_sanitizers_see_a_planted_fault(kind: str, fault: str, words: str) -> None:
    done = check(kind, SAGELLM_NATIVE_FAULT=fault)
    assert done.returncode == 1 and words in done.stderr, done.stderr[-4000:]


def test_the_host_that_plays_turbomind_tells_what_it_finds() -> None:
    """By itself it plants every fault that its checks are for; this one is to be seen outside."""
    done = check("turbomind", "--table", "native", "uncomputed-blocks", SAGELLM_NATIVE_FAULT="uncomputed")
    assert done.returncode == 1 and "finding: uncomputed-blocks with table native" in done.stderr, done.stderr[-4000:]
    assert check("turbomind", "no-such-scenario").returncode == 2


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("tokens", "finding: "),  # an index that does not compare every token
        ("recency", "finding: "),  # one that forgets to note lookups
        ("locks", "finding: "),  # one whose locks hold nothing
        ("overrun", "ERROR: AddressSanitizer"),  # one that reads behind the tokens it is given
    ],
)
def test_fuzzing_finds_a_planted_fault_and_keeps_its_input(fault: str, words: str) -> None:
    done = check("fuzz", "60", SAGELLM_FUZZ_FAULT=fault)
    assert done.returncode == 1 and words in done.stderr, done.stderr[-4000:]
    kept = KEPT.search(done.stderr)
    assert kept is not None
    again = check("replay", kept[1], SAGELLM_FUZZ_FAULT=fault)
    healthy = check("replay", kept[1])
    Path(kept[1]).unlink()
    assert again.returncode == 1 and words in again.stderr
    assert healthy.returncode == 0, healthy.stderr[-4000:]


def test_fuzzing_finds_nothing_else(fuzzing: "subprocess.Popen[str]") -> None:
    """Waits for the run that began with the first test here."""
    told, _ = fuzzing.communicate()
    if fuzzing.returncode == CANNOT:
        pytest.skip(told.strip().splitlines()[-1])
    assert fuzzing.returncode == 0, told[-4000:]
    runs = RUNS.search(told)
    assert runs is not None and int(runs[1] or runs[2]) > SECONDS, told[-1000:]
