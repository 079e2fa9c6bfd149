"""Tests of the configuration of a benchmark. Each mistake gives one line; the exit code is 2, and nothing is written."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from benchmarks.config import CONFIGS, load_config, make_config, preset, preset_names, read_yaml
from benchmarks.errors import BenchmarkError
from benchmarks.runner import main

CLOSED, POISSON = {"kind": "closed", "concurrency": 2}, {"kind": "poisson", "rate": 3}
WORKLOAD = {
    "arrivals": CLOSED,
    "num_requests": 4,
    "prompt_tokens": {"kind": "constant", "value": 48},
    "output_tokens": {"kind": "uniform", "low": 4, "high": 16},
}
TRACE = {"kind": "trace", "file": "trace.jsonl"}
CHAT = {"name": "chat", "prompt_tokens": {"kind": "constant", "value": 48}, "output_tokens": {"kind": "constant", "value": 8}}
DOCUMENT = CHAT | {"name": "document", "prompt_tokens": {"kind": "constant", "value": 500}}
MIXED = {"prompt_tokens": None, "output_tokens": None, "classes": [CHAT, DOCUMENT]}


def values(**changes: Any) -> dict[str, Any]:
    """A config that is in order, with changes; keys of `workload` replace single keys of it."""
    workload = WORKLOAD | changes.pop("workload", {})
    return {"name": "test", "workload": {key: value for key, value in workload.items() if value is not None}} | changes


def only(**keys: Any) -> dict[str, Any]:
    return {"name": "test"} | keys


MISTAKES = {
    "unknown key": (values(colour="red"), "colour: unknown key"),
    "unknown key inside": (values(workload={"colour": "red"}), "workload.colour: unknown key"),
    "unknown server option": (values(server={"colour": "red"}), "server.colour: unknown key"),
    "bad server option of a contestant": (
        values(contestants=[{"name": "a"}, {"name": "b", "server": {"block_size": 7}}]),
        "block_size",
    ),
    "no name": ({"workload": WORKLOAD}, "name: Field required"),
    "a name that is no file name": (values(name="a/b"), "name"),
    "rate 0": (values(workload={"arrivals": POISSON | {"rate": 0}}), "rate: Input should be greater than 0, got 0"),
    "rate below 0": (values(workload={"arrivals": POISSON | {"rate": -1}}), "rate"),
    "endless rate": (values(workload={"arrivals": POISSON | {"rate": float("inf")}}), "rate"),
    "no users": (values(workload={"arrivals": CLOSED | {"concurrency": 0}}), "concurrency"),
    "unknown arrivals": (values(workload={"arrivals": {"kind": "bursts"}}), "'closed', 'poisson', 'trace'"),
    "unknown length": (values(workload={"prompt_tokens": {"kind": "zipf"}}), "'constant', 'uniform', 'lognormal'"),
    "no prompt lengths": (values(workload={"prompt_tokens": None}), "prompt_tokens and output_tokens are needed"),
    "low above high": (
        values(workload={"prompt_tokens": {"kind": "uniform", "low": 9, "high": 8}}),
        "low 9 is above high 8",
    ),
    "median outside": (
        values(workload={"prompt_tokens": {"kind": "lognormal", "median": 99, "sigma": 1, "high": 8}}),
        "median 99 is not between low 1 and high 8",
    ),
    "everything reused": (values(workload={"reuse": 1.0}), "workload.reuse"),
    "trace with lengths": (values(workload={"arrivals": TRACE}), "a trace brings its own lengths and prefixes"),
    "trace with reuse": (
        only(workload={"arrivals": TRACE, "num_requests": 4, "reuse": 0.5}),
        "a trace brings its own lengths and prefixes",
    ),
    "classes and lengths": (values(workload={"classes": [CHAT]}), "classes bring their own lengths and prefixes"),
    "classes of a trace": (values(workload=MIXED | {"arrivals": TRACE}), "classes bring their own lengths and prefixes"),
    "classes of one name": (values(workload=MIXED | {"classes": [CHAT, CHAT]}), "names of their own, got ['chat', 'chat']"),
    "a class with a dot": (values(workload=MIXED | {"classes": [CHAT | {"name": "a.b"}]}), "classes.0.name"),
    "a class without requests": (
        values(workload=MIXED | {"classes": [CHAT, DOCUMENT | {"share": 0.01}]}),
        "class document has no request among 4: raise num_requests or its share",
    ),
    "a class without a share": (values(workload=MIXED | {"classes": [CHAT | {"share": 0}]}), "classes.0.share"),
    "a class asks for too much": (
        values(workload=MIXED | {"classes": [CHAT | {"service": {"priority": 1000}}]}),
        "classes.0.service.priority: Input should be less than or equal to 100, got 1000",
    ),
    "a class with a deadline": (
        values(workload=MIXED | {"classes": [CHAT | {"service": {"deadline": 4e9}}]}),
        "service.deadline is a time of the clock",
    ),
    "a class beyond the context": (
        values(workload=MIXED, server={"context_length": 500}),
        "may take 508 tokens; the server's context_length is 500",
    ),
    "unknown endpoint": (values(workload={"endpoint": "batch"}), "endpoint"),
    "sweep of an open loop": (
        values(workload={"arrivals": POISSON}, sweep=[1, 2]),
        "sweep needs a workload with closed arrivals",
    ),
    "sweep without workload": (only(components={"hook_call": {}}, sweep=[1]), "sweep needs a workload"),
    "sweep with nobody": (values(sweep=[2, 0]), "each must be at least 1"),
    "more tokens than the context": (
        values(server={"context_length": 63}),
        "may take 64 tokens; the server's context_length is 63",
    ),
    "more tokens than one contestant's context": (
        values(contestants=[{"name": "a"}, {"name": "b", "server": {"context_length": 63}}]),
        "may take 64 tokens; the server's context_length is 63",
    ),
    "one name for two": (values(contestants=[{"name": "a"}, {"name": "a"}]), "names of their own, got ['a', 'a']"),
    "no contestant": (values(contestants=[]), "contestants"),
    "nothing to run": (only(), "nothing to run: give a workload, components, or both"),
    "no rounds": (values(rounds=0), "rounds"),
    "no limit": (values(client_lag_limit=0), "client_lag_limit"),
    "no limit of the client's share": (values(client_cpu_limit=0), "client_cpu_limit"),
    "free below zero": (values(price={"per_device_hour": -1}), "price.per_device_hour"),
}


@pytest.fixture
def run(tmp_path: Path) -> Any:
    """`run(*options)`: the command line with --out tmp_path/out."""

    def call(*options: object) -> Result:
        return CliRunner().invoke(main, [*map(str, options), "--out", str(tmp_path / "out")])

    return call


def assert_misuse(done: Result, *lines: str) -> None:
    """Exit code 2, and as many lines on standard error as given here, each with its text; nothing else."""
    assert (done.exit_code, done.stdout) == (2, ""), done.output
    assert len(done.stderr.splitlines()) == len(lines), done.stderr
    for line, text in zip(done.stderr.splitlines(), lines, strict=True):
        assert line.startswith("error: ") and text in line


def test_what_is_left_out_has_a_value():
    config = make_config(values())
    assert [contestant.name for contestant in config.contestants] == ["head"]
    assert (config.workload.cache, config.workload.endpoint, config.workload.reuse) == ("cold", "generate", 0.0)
    assert make_config(config.model_dump(mode="json")) == config


def test_exactly_the_context_is_allowed():
    config = make_config(values(server={"context_length": 64}))
    assert config.sage_config(config.contestants[0]).context_length == 64


def test_a_contestant_changes_single_options_of_the_server():
    sides = [{"name": "a"}, {"name": "b", "server": {"block_size": 32}}]
    config = make_config(values(server={"block_size": 16, "kv_blocks": 64}, contestants=sides))
    assert [(sage.block_size, sage.kv_blocks) for sage in map(config.sage_config, config.contestants)] == [
        (16, 64),
        (32, 64),
    ]


@pytest.mark.parametrize(("config", "text"), MISTAKES.values(), ids=MISTAKES.keys())
def test_a_mistake_is_one_line(config: dict[str, Any], text: str):
    with pytest.raises(BenchmarkError) as caught:
        make_config(config, "FILE")
    assert str(caught.value).startswith("FILE: ")
    assert text in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_one_line_a_mistake(tmp_path: Path, run: Any):
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(values(colour="red", rounds=0, workload={"num_requests": 1})))
    assert_misuse(run("--config", file), "workload.num_requests", "rounds", "colour: unknown key")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"name: [", "is no YAML"),
        (b"name: test\n\tworkload: 1", "is no YAML"),
        (b"\xff\xfe\x00 no text", "config.yaml"),
        (b"", "it must hold keys and values"),
        (b"- name: test", "it must hold keys and values"),
        (b"1: 2\nname: test", "1"),
        (None, "cannot read"),
    ],
    ids=["unclosed", "tab", "no text", "empty", "a list", "a key that is no text", "no file"],
)
def test_files_that_cannot_be_read(tmp_path: Path, run: Any, content: bytes | None, text: str):
    file = tmp_path / "config.yaml"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(BenchmarkError) as caught:
        load_config(file)
    assert str(file) in str(caught.value) and text in str(caught.value)
    assert_misuse(run("--config", file), text)
    assert not (tmp_path / "out").exists()


def test_a_folder_is_no_config(tmp_path: Path, run: Any):
    with pytest.raises(BenchmarkError, match="cannot read"):
        load_config(tmp_path)
    assert run("--config", tmp_path).exit_code == 2
    assert not (tmp_path / "out").exists()


def test_the_promised_presets_are_there():
    assert {"ci", "small", "medium", "long_context", "high_concurrency"} <= set(preset_names())


@pytest.mark.parametrize("name", preset_names())
def test_presets_are_configs_of_their_files_names(name: str):
    assert preset(name).name == name


def test_an_unknown_preset_is_told_the_known_ones(tmp_path: Path, run: Any):
    with pytest.raises(BenchmarkError, match="'huge' is unknown") as caught:
        preset("huge")
    assert all(name in str(caught.value) for name in preset_names())
    assert_misuse(run("--preset", "huge"), ", ".join(preset_names()))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--preset", "ci", "--scenario", "hook_call"),
        ("--config", "config.yaml", "--preset", "ci"),
        ("--config", "config.yaml", "--preset", "ci", "--scenario", "hook_call"),
    ],
)
def test_one_source_of_the_config(tmp_path: Path, run: Any, options: tuple[str, ...]):
    assert_misuse(run(*options), "give one of --config, --preset and --scenario")
    assert not (tmp_path / "out").exists()


def test_an_unknown_scenario_is_told_the_known_ones(tmp_path: Path, run: Any):
    known = (
        "collective, comm_fusion, comm_overhead, comm_share, comm_transfer, control_message, "
        "hook_call, kv_migration, kv_policy, kv_transfer, pd_answers, pd_faults, pd_interference, plan_build, "
        "prefix_eviction, prefix_index, prefix_readers, prefix_schedule, quantized, speculative_propose, "
        "victim_choice"
    )
    assert_misuse(run("--scenario", "telepathy"), f"known are serve, {known}")
    assert not (tmp_path / "out").exists()


def test_an_unknown_option_of_a_component(tmp_path: Path, run: Any):
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(only(components={"hook_call": {"colour": "red"}})))
    assert_misuse(run("--config", file), "no options colour; allowed: calls, notices_per_call")
    assert not (tmp_path / "out").exists()


def test_a_checkout_without_an_environment(tmp_path: Path, run: Any):
    (tmp_path / "old").mkdir()
    config = values(contestants=[{"name": "old", "checkout": str(tmp_path / "old")}])
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    assert_misuse(run("--config", str(tmp_path / "config.yaml")), "has no .venv/bin/python; run ./apply_patches.sh there")
    assert not (tmp_path / "out").exists()


def test_out_is_needed():
    done = CliRunner().invoke(main, ["--scenario", "hook_call"])
    assert done.exit_code == 2 and "--out" in done.stderr


@pytest.mark.parametrize("name", ["result.json", "notes.txt"])
def test_nothing_is_written_over(tmp_path: Path, run: Any, name: str):
    out = tmp_path / "out"
    out.mkdir()
    (out / name).write_text("mine")
    assert_misuse(run("--scenario", "hook_call"), "is not empty; choose another --out")
    assert [(file.name, file.read_text()) for file in out.iterdir()] == [(name, "mine")]


def test_out_that_cannot_be_made(tmp_path: Path):
    (tmp_path / "file").write_text("")
    done = CliRunner().invoke(main, ["--scenario", "hook_call", "--out", str(tmp_path / "file" / "out")])
    assert_misuse(done, "cannot write to")


def test_options_of_a_component_for_one_contestant():
    config = preset("planted_collective")
    assert [each.components for each in config.contestants] == [{}, {}, {"collective": {"slower": 0.2}}]
    with pytest.raises(BenchmarkError, match="head has options of telepathy, which is not among the components"):
        make_config({"name": "a", "components": {"collective": {}}, "contestants": [
            {"name": "head", "components": {"telepathy": {}}}
        ]})  # fmt: skip


@pytest.mark.parametrize(
    ("topology", "words"),
    [
        ({"workers": 2}, "topology.workers is 2, and the server has 1"),
        ({"threads": 2}, "topology.threads is 2, and the server has 1"),
        ({"link": "shm"}, "topology.link is shm, and the server has auto"),
        ({"hosts": 0}, "topology.hosts: Input should be greater than or equal to 1"),
    ],
)
def test_a_topology_that_the_server_has_not(topology, words):
    values = {"name": "a", "server": {"threads": 1}, "components": {"collective": {}}, "topology": topology}
    with pytest.raises(BenchmarkError, match=words):
        make_config(values)


def test_presets_name_their_topology():
    for file in CONFIGS.glob("*.yaml"):
        assert "topology" in read_yaml(file), file.name
