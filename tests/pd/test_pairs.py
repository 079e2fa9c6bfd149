"""Tests of the connections between engines, some of which hang, are not there yet, or do not fit."""

import asyncio
import contextlib
from itertools import pairwise

import pytest

from sagellm.comm_backend.group_messages import Capabilities
from sagellm.pd.group import Group, NotTheOne
from tests.pd.below import KEY, Below, soon


@contextlib.asynccontextmanager
async def playing(*engines):
    """A group which they have joined one after the other; a join answers at once, whatever becomes of the pairs."""
    group = Group(KEY)
    await group.start()
    try:
        for one in engines:
            await one.start()
            await asyncio.wait_for(group.join(one.url), 15)
        yield group
    finally:
        await group.close()
        for one in engines:
            await one.close()


def test_an_engine_that_hangs_while_it_is_connected_holds_up_nobody(monkeypatch):
    """Neither pairs nor joins: each would wait for 30 s."""
    monkeypatch.setattr("sagellm.pd.group.LOOK_S", 0.05)

    async def play():
        hanging, other, prefill, late = Below(), Below(), Below("prefill"), Below("decode")
        hanging.hangs = True
        async with playing(hanging, other, prefill, late) as group:
            for one in (other, late):
                await soon("connected", lambda one=one: group.engines[one.url].sources == {prefill.url: "one"})
            assert len(hanging.connects) == 1 and hanging.url in group.engines
            assert not group.engines[hanging.url].sources and not group.engines[hanging.url].refused

    asyncio.run(play())


@pytest.mark.parametrize("fields", [{"weights": "others"}, {"num_layers": 2}])
def test_what_does_not_fit_is_asked_again_when_it_is_another_instance(fields, monkeypatch):
    monkeypatch.setattr("sagellm.pd.group.LOOK_S", 0.01)

    async def play():
        decode, prefill = Below("decode"), Below("prefill", **fields)
        decode.refuses = "they do not fit."
        async with playing(decode, prefill) as group:
            looks, look = [], group._pairs.look
            monkeypatch.setattr(group._pairs, "look", lambda: looks.append(look()))

            async def refused(num):
                await soon("refused", lambda: group.engines[decode.url].refused)
                looks.clear()
                await soon("some looks", lambda: len(looks) > 10)
                (why,) = group.engines[decode.url].refused.values()
                assert "they do not fit." in why and len(decode.connects) == num

            await refused(1)
            for one in (prefill, decode):  # the proxy has lost the connection to it alone
                await group.leave(one.url, "test")
                assert not any(each.refused for each in group.engines.values())
                await group.join(one.url)
                await refused(1)
            prefill.instance = "two"
            await group.leave(prefill.url, "test")
            await group.join(prefill.url)
            await refused(2)

    asyncio.run(play())


def test_what_cannot_be_connected_now_is_tried_again_later_each_time(monkeypatch):
    monkeypatch.setattr("sagellm.pd.group.LOOK_S", 0.01)
    monkeypatch.setattr("sagellm.pd.pairs.FIRST_BACKOFF_S", 0.05)

    async def play():
        decode, prefill = Below("decode"), Below("prefill")
        decode.refuses = "cannot connect."
        async with playing(decode, prefill) as group:
            await soon("three times", lambda: len(decode.connects) == 3)
            assert group.status()["engines"][0]["refused"][prefill.url].endswith("cannot connect.")
            decode.refuses = ""
            await soon("connected", lambda: group.engines[decode.url].sources)
            assert not group.engines[decode.url].refused
            waits = [after - before for before, after in pairwise(decode.connects)]
            assert all(wait >= 0.05 * 2**number for number, wait in enumerate(waits))

    asyncio.run(play())


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
