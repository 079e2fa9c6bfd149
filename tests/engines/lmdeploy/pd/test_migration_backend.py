"""LMDeploy's own migration path, cache engine and all, over KV channels, between two processes."""

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from lmdeploy.pytorch.disagg.backend import backend as lmdeploy_backends
from lmdeploy.pytorch.disagg.conn.protocol import DistServeKVTransferEndpointInfo, MigrationProtocol
from lmdeploy.pytorch.disagg.messages import AssignmentInstruct, MigrationAssignment, MigrationExecutionBatch

from sagellm.comm_backend.kv_transfer.registry import channel_names, find_channel
from sagellm.core.config import HookConfig
from sagellm.core.errors import TransferError
from sagellm.engines.lmdeploy.pd.migration_backend import choice, register
from sagellm.engines.lmdeploy.pd.workers import options_of
from tests.engines.lmdeploy.pd.caches import BLOCK_SIZE, HEAD_DIM, LAYERS, cache_engine, init_request
from tests.engines.lmdeploy.pd.migration_owner import OWNER, READER, engine_of
from tests.engines.lmdeploy.pd.pair import hooks, key_file

ROOT = Path(__file__).parents[4]
NUM_OWNER_BLOCKS = 7


@pytest.fixture
def engines(request):
    """`engines(channel)`: our cache engine, and the other process, both connected as LMDeploy's proxy has it done."""
    running = []

    def start(channel, **own):
        if missing := find_channel(channel).missing():
            pytest.skip(missing)
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.engines.lmdeploy.pd.migration_owner", channel, str(NUM_OWNER_BLOCKS)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
        )  # fmt: skip
        engine = engine_of(channel, 5, **own)
        running.append((process, engine))
        info = next((line[5:] for line in process.stdout if line.startswith("INFO ")), "")
        assert info, "the owner has ended"
        told = engine.p2p_initialize(init_request(READER, engine, OWNER, NUM_OWNER_BLOCKS))
        process.stdin.write(told.model_dump_json() + "\n")
        process.stdin.flush()
        engine.p2p_connect(OWNER, [DistServeKVTransferEndpointInfo.model_validate_json(info)])
        return engine, process

    start.running = running
    yield start
    for process, engine in running:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()
        if engine.migration_backend_impl is not None:
            engine.migration_backend_impl.close()


def migrate(engine, pairs):
    """`pairs`: (block of the peer, own block), as LMDeploy's engine gives them."""
    asyncio.run(engine.migrate(MigrationExecutionBatch(protocol=MigrationProtocol.TCP, requests=[(OWNER, pairs)])))


def owner_content():
    generator = torch.Generator().manual_seed(1)
    shape = (LAYERS, NUM_OWNER_BLOCKS, BLOCK_SIZE, 2, HEAD_DIM)
    return [torch.randn(shape, generator=generator) for _ in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize("channel", ["shm", "mooncake", "nixl"])
def test_lmdeploy_migrates_over_a_channel(engines, channel):
    engine, _ = engines(channel)
    check_migration(engine)


def check_migration(engine):
    migrate(engine, [(6, 1), (0, 4), (3, 0)])
    for tensor, expected in zip(engine.full_gpu_cache, owner_content(), strict=True):
        assert torch.equal(tensor[:, [1, 4, 0]], expected[:, [6, 0, 3]])
        assert not tensor[:, [2, 3]].any()


@pytest.mark.slow
def test_another_key_is_refused_on_both_sides(engines):
    with pytest.raises(TransferError, match="does not have the same key"):
        engines("tcp", key=b"another key than theirs")
    process, _ = engines.running[0]
    said = process.stdout.readline()
    assert said.startswith("REFUSED") and "does not have the same key" in said


@pytest.mark.slow
def test_over_tcp_what_lmdeploy_asks_for_has_to_be_blocks_until_the_peer_has_gone(engines):
    engine, process = engines("tcp")
    check_migration(engine)
    size = BLOCK_SIZE * 2 * HEAD_DIM * 4

    def ask(*instructs):
        names = ("mr_key", "target_offset", "source_offset", "length")
        batch = [AssignmentInstruct(**dict(zip(names, values, strict=True))) for values in instructs]
        assignment = MigrationAssignment(protocol=MigrationProtocol.TCP, remote_engine_id=OWNER, batch=batch)
        asyncio.run(engine.migration_backend_impl.p2p_migrate(assignment))

    whole = [
        (key, (layer * NUM_OWNER_BLOCKS + 2) * size, (layer * 5 + 3) * size, size) for key in "01" for layer in range(LAYERS)
    ]
    ask(*whole)
    assert torch.equal(engine.full_gpu_cache[1][:, 3], owner_content()[1][:, 2])
    with pytest.raises(TransferError, match="missing"):
        ask(*whole[:-1])
    with pytest.raises(TransferError, match="blocks there have 256 bytes"):
        ask(*[(key, src, dst, n // 2) for key, src, dst, n in whole])
    with pytest.raises(TransferError, match="no bytes"):
        ask(("7", 0, 0, size))
    with pytest.raises(TransferError, match="layer 1 of the peer for layer 0"):
        ask(("0", NUM_OWNER_BLOCKS * size, 0, size))
    ask(*whole)
    process.kill()
    process.wait()
    with pytest.raises(TransferError):
        ask(*whole)


def test_other_numbers_of_ranks_are_refused():
    engine = engine_of("tcp", 3)
    with pytest.raises(TransferError, match="1 ranks here, 2 at"):
        engine.p2p_initialize(init_request(READER, engine, OWNER, 3, peer_ranks=2))


def test_names_beside_those_of_lmdeploy():
    known = lmdeploy_backends.MIGRATION_BACKENDS.module_dict
    own = {name: kind for name, kind in known.items() if not name.startswith("sage-")}
    assert register() == [f"sage-{name}" for name in channel_names()]
    assert set(known) >= {"sage-shm", "sage-tcp", "sage-mooncake", "sage-nixl"}
    assert {name: known[name] for name in own} == own
    assert choice("tcp").name == "sage-tcp"
    with pytest.raises(TransferError, match="'pigeon' is unknown"):
        choice("pigeon")


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_pool_of_a_group_brings_them_with_its_key(monkeypatch, tmp_path, ranks):
    known = {name: kind for name, kind in lmdeploy_backends.MIGRATION_BACKENDS.module_dict.items() if name[:5] != "sage-"}
    own = dict(known)
    monkeypatch.setattr(lmdeploy_backends.MIGRATION_BACKENDS, "_module_dict", known)
    cache_engine(3, ranks=ranks)
    assert known == own, "an engine without a group has no key to move blocks with"
    pd = hooks("decode", key_file(tmp_path), timeout_s=7)
    keyless = pd.model_copy(update={"key_file": tmp_path / "none"})
    cache_engine(3, ranks=ranks, sage=HookConfig(pd=keyless).model_dump_json())
    assert not {f"sage-{name}" for name in channel_names()} & set(known), "who opens the channel says what is wrong"
    engine = cache_engine(3, ranks=ranks, sage=HookConfig(pd=pd).model_dump_json())
    for name in channel_names():
        backend = known[f"sage-{name}"]
        assert (backend.channel_name, backend.options, backend.timeout_s) == (name, options_of(pd), 7)
    assert {name: known[name] for name in own} == own and (engine.cache_config.migration_backend.name in known) == (ranks > 1)
