"""An engine that answers nothing any more, below a server that does."""

import asyncio

import pytest

from sagellm.comm_backend.group_messages import Capabilities
from sagellm.pd.group import Group, NotTheOne
from tests.pd.below import KEY, Below


@pytest.mark.parametrize("falls_silent", [False, True])
def test_an_engine_that_is_silent_below_a_healthy_server_is_given_up(falls_silent, monkeypatch):
    monkeypatch.setattr("sagellm.pd.group.HEALTH_S", 0.05)

    async def play():
        # A healthy one has long to answer, and is watched for longer than that.
        below, group = Below(), Group(KEY, silent_s=0.3 if falls_silent else 1.5)
        await below.start()
        await group.start()
        try:
            engine = await group.join(below.url)
            below.is_silent = falls_silent
            for _ in range(400 if falls_silent else 44):
                await asyncio.sleep(0.05)
                if engine.hangs.is_set():
                    break
            await asyncio.sleep(0)
            return engine.hangs.is_set(), below.url in group.engines
        finally:
            await group.close()
            await below.close()

    assert asyncio.run(play()) == (falls_silent, not falls_silent)


@pytest.mark.parametrize("roles", [("prefill",), ()])
def test_an_engine_that_cannot_do_its_part_does_not_join(roles):
    async def play():
        below, group = Below("decode"), Group(KEY)
        below.capabilities = Capabilities(roles=roles, missing={} if roles else {"roles": "no KV channel works here"})
        await group.start()
        await below.start()
        try:
            with pytest.raises(NotTheOne, match="is to be a decode engine and cannot: (it can be prefill|no KV channel)"):
                await group.join(below.url)
            assert not group.engines
            below.capabilities = Capabilities(dtypes=("float32",))
            await group.join(below.url)
            (known,) = group.status()["engines"]
            assert known["capabilities"]["dtypes"] == ("float32",)
        finally:
            await group.close()
            await below.close()

    asyncio.run(play())
