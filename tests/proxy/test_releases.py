"""What decode does not fetch, prefill lets go at once: stand-ins for engines, prefill's with the real channel and books."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
from aiohttp import web

from kvpool.core.signed_fields import verify_fields
from kvpool.ops.services.ports import free_port
from kvpool.transfer import release
from kvpool.transfer.channel import Responder
from kvpool.transfer.ledger import Ledger
from kvpool.transfer.messages import Reply, Request
from kvpool.transfer.offer import Offer
from kvpool.transfer.secret import Secret
from kvpool.transfer.service import TransferService
from tests.proxy.fakes import Engine
from tests.proxy.harness import SECRET, Running, engines, proxy, run, until

PULL = "the pull of decode"


class Keeper:
    """The part of prefill that keeps offers."""

    def __init__(self, engine: Engine, secret: bytes = SECRET.encode()) -> None:
        self.port = free_port()
        self.prefill = engine
        self.secret = Secret(secret, "shared")
        self.ledger = Ledger(1, 600.0)
        self.service = TransferService(self.ledger, 1, "process_vm", {})
        self.busy = threading.Event()  # no question is answered
        self.asked = 0
        self.responder = Responder("127.0.0.1", self.port, secret, self._reply)
        self.stuck: str | None = None  # before it has "offered", or after
        self.goes_on = asyncio.Event()
        self.opened: list[bool] = []
        engine.answer = self.answer

    def _reply(self, request: Request) -> Reply:
        self.asked += 1
        end = time.monotonic() + 20
        while self.busy.is_set() and time.monotonic() < end:
            time.sleep(0.005)
        return self.service.answer(request)

    async def answer(self, seen: Any, request: web.Request) -> web.StreamResponse:
        assert verify_fields(SECRET.encode(), seen.params)
        transfer_id = seen.params["transfer_id"]
        if self.stuck == "before":
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:  # a step of the engine goes on although the client has gone
                await self.goes_on.wait()
        self.opened.append(self.ledger.open(transfer_id, "prompt", ((1,),), staged=False))
        if self.stuck == "after":
            await asyncio.sleep(60)
        offer = Offer(transfer_id, self.service.instance, "127.0.0.1", self.port, 7, 600)
        params = offer.to_params(self.secret, "P", "r", [[1]])
        return web.json_response({"choices": [], "kv_transfer_params": params})

    def pull(self, seen: Any) -> str:
        """As decode does; what prefill says at the end."""
        transfer_id = seen.params["transfer_id"]
        assert self.ledger.begin(transfer_id, PULL, 0, "prompt") == ((1,),)
        return self.ledger.end(transfer_id, PULL, 0)


@asynccontextmanager
async def keeping(*flags: str, secret: str = SECRET, decode: int = 1) -> AsyncIterator[tuple[Keeper, list[Engine], Running]]:
    async with engines(1, decode) as (ps, ds):
        keeper = Keeper(ps[0], secret.encode())
        try:
            async with proxy(ps, ds, *flags, env={"KVPOOL_SECRET": SECRET}) as running:
                yield keeper, ds, running
        finally:
            keeper.busy.clear()
            keeper.responder.close()


async def is_let_go(keeper: Keeper, running: Running, times: int = 1) -> None:
    """Soon, long before its time is up, and so often."""
    await until(lambda: not len(keeper.ledger))
    news = keeper.ledger.take_closed()
    assert [closed.reason for closed in news] == ["its decode request has ended"] * times
    await running.is_idle()
    await until(lambda: _told(running, times))


async def refuses(seen: Any, request: web.Request) -> web.StreamResponse:
    """What a decode engine answers to a request that it will not take."""
    return web.json_response({"error": {"message": "no", "code": 400}}, status=400)


async def _forgotten(running: Running, times: int) -> bool:
    return (await running.metric("kvpool_proxy_releases_total", outcome="restarted") or 0) == times


async def _told(running: Running, times: int) -> bool:
    return await running.metric("kvpool_proxy_releases_total", outcome="told") == times


def test_what_decode_has_fetched_is_not_released() -> None:
    async def scenario() -> None:
        async with keeping() as (keeper, ds, running):

            async def fetches(seen: Any, request: web.Request) -> web.StreamResponse:
                assert keeper.pull(seen) == ""
                return await ds[0].decode(seen, request)

            ds[0].answer = fetches
            for stream in (False, True):
                assert (await running.complete(stream=stream)).status == 200
            await asyncio.sleep(0.2)
            assert [closed.reason for closed in keeper.ledger.take_closed()] == ["", ""]
            assert not await running.metric("kvpool_proxy_releases_total")

    run(scenario())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("status", [400, 500])
def test_a_decode_engine_that_refuses_frees_prefill(status, stream) -> None:
    async def scenario() -> None:
        async with keeping() as (keeper, ds, running):

            async def refuses(seen: Any, request: web.Request) -> web.StreamResponse:
                return web.json_response({"error": {"message": "no", "code": status}}, status=status)

            ds[0].answer = refuses
            assert (await running.complete(stream=stream)).status == status
            await is_let_go(keeper, running)

    run(scenario())


def test_every_try_frees_prefill() -> None:
    """The first decode engine breaks off, the second serves, with an offer of its own."""

    async def scenario() -> None:
        async with keeping(decode=2) as (keeper, ds, running):

            async def breaks(seen: Any, request: web.Request) -> web.StreamResponse:
                assert request.transport is not None
                if sum(len(one.seen) for one in ds) == 1:
                    await asyncio.sleep(0.1)
                    request.transport.abort()
                    raise ConnectionResetError
                keeper.pull(seen)
                return await ds[0].decode(seen, request)

            ds[0].answer = ds[1].answer = breaks
            assert (await running.complete()).status == 200
            await until(lambda: not len(keeper.ledger))
            assert sorted(closed.reason for closed in keeper.ledger.take_closed()) == ["", "its decode request has ended"]

    run(scenario())


@pytest.mark.parametrize("reading", [False, True])
def test_a_client_that_leaves_while_decode_waits_frees_prefill(reading) -> None:
    """Also in the middle of a pull, whose reader is then told that what it has read is worth nothing."""

    async def scenario() -> None:
        async with keeping() as (keeper, ds, running):
            ds[0].gate.clear()
            asked = asyncio.create_task(running.complete(stream=True, n=3))
            await until(lambda: len(ds[0].seen) == 3)
            ids = [seen.params["transfer_id"] for seen in ds[0].seen]
            if reading:
                assert all(keeper.ledger.begin(one, PULL, 0, "prompt") for one in ids)
            asked.cancel()
            await is_let_go(keeper, running, 3)
            if reading:
                assert keeper.ledger.end(ids[0], PULL, 0) == "its decode request has ended"

    run(scenario())


def test_decode_that_dies_frees_prefill() -> None:
    async def scenario() -> None:
        async with keeping("--max-retries", "0") as (keeper, ds, running):
            ds[0].gate.clear()
            asked = asyncio.create_task(running.complete())
            await until(lambda: len(ds[0].seen) == 1)
            await ds[0].stop()
            assert (await asked).status in (502, 503)
            await until(lambda: not len(keeper.ledger))

    run(scenario())


@pytest.mark.parametrize("stuck", ["before", "after"])
def test_a_client_that_leaves_as_prefill_computes_frees_prefill(stuck) -> None:
    """Nobody sees the answer with the offer: it is released by the id that the request carried, also where prefill has yet to make
    it."""

    async def scenario() -> None:
        async with keeping() as (keeper, ds, running):

            async def fetches(seen: Any, request: web.Request) -> web.StreamResponse:
                keeper.pull(seen)
                return await ds[0].decode(seen, request)

            ds[0].answer = fetches
            assert (await running.complete()).status == 200  # the proxy knows the listener now
            keeper.ledger.take_closed()
            keeper.stuck = stuck
            asked = asyncio.create_task(running.complete())
            await until(lambda: len(keeper.prefill.seen) == 2 and len(keeper.opened) == (1 if stuck == "before" else 2))
            asked.cancel()
            with suppress(asyncio.CancelledError):
                await asked
            await until(lambda: _told(running, 1))
            keeper.goes_on.set()
            await until(lambda: len(keeper.opened) == 2)
            assert not len(keeper.ledger), "prefill keeps what nobody will fetch"
            assert keeper.opened[1] is (stuck == "after")
            assert [closed.released for closed in keeper.ledger.take_closed()] == [True] * (stuck == "after")
            assert len(ds[0].seen) == 1

    run(scenario())


def test_offers_of_another_secret_are_passed_on_and_not_touched() -> None:
    async def scenario() -> None:
        async with keeping(secret="quite another secret") as (keeper, ds, running):
            ds[0].answer = refuses
            assert (await running.complete()).status == 400
            await asyncio.sleep(0.2)
            assert len(keeper.ledger) == 1
            assert ds[0].seen[0].params["transfer_auth"] == "shared"

    run(scenario())


def test_a_prefill_engine_that_is_dead_delays_neither_clients_nor_the_end(monkeypatch) -> None:
    monkeypatch.setattr(release, "ANSWER_S", 60.0)

    async def scenario() -> None:
        async with keeping() as (keeper, ds, running):
            ds[0].answer = refuses
            keeper.responder.close()
            began = time.monotonic()
            answers = await asyncio.gather(*(running.complete() for _ in range(20)))
            assert {answer.status for answer in answers} == {400}
            assert time.monotonic() - began < 20, "clients wait for a prefill engine to be told"
        assert time.monotonic() - began < 40

    run(scenario())


def test_a_prefill_engine_that_is_busy_is_told_when_it_listens_again(monkeypatch) -> None:
    monkeypatch.setattr(release, "ANSWER_S", 0.3)

    async def scenario() -> None:
        async with keeping() as (keeper, ds, running):
            ds[0].answer = refuses
            keeper.busy.set()
            began = time.monotonic()
            answers = await asyncio.gather(*(running.complete() for _ in range(5)))
            assert {answer.status for answer in answers} == {400}
            await asyncio.sleep(2.0)
            assert len(keeper.ledger) == 5
            assert await running.metric("kvpool_proxy_releases_waiting") == 5
            assert not await running.metric("kvpool_proxy_releases_total")
            keeper.busy.clear()
            await is_let_go(keeper, running, 5)
            assert time.monotonic() - began < 15
            assert await running.metric("kvpool_proxy_releases_waiting") == 0

    run(scenario())


async def serve_once(keeper: Keeper, ds: list[Engine], running: Running) -> None:
    """So that the proxy knows where prefill listens."""

    async def fetches(seen: Any, request: web.Request) -> web.StreamResponse:
        keeper.pull(seen)
        return await ds[0].decode(seen, request)

    ds[0].answer = fetches
    assert (await running.complete()).status == 200
    keeper.ledger.take_closed()


async def leave(keeper: Keeper, running: Running) -> None:
    """A client that goes away while prefill computes."""
    keeper.stuck, before = "after", len(keeper.opened)
    asked = asyncio.create_task(running.complete())
    await until(lambda: len(keeper.opened) > before)
    asked.cancel()
    with suppress(asyncio.CancelledError):
        await asked
    keeper.stuck = None


@pytest.mark.parametrize("down", [True, False])
def test_a_prefill_engine_that_was_started_anew_on_another_port_is_told_there_only(down) -> None:
    """Seen to be down in between, or not: then the old one is asked once more, and forgotten."""

    async def scenario() -> None:
        async with keeping("--health-interval", "0.1") as (old, ds, running):
            await serve_once(old, ds, running)
            if down:
                await old.prefill.stop()
                await until(lambda: _state(running, "down"))
                await old.prefill.start()
                await until(lambda: _state(running, "ready"))
            new = Keeper(old.prefill)
            old.service.instance = "of whoever has the old port now"
            old.asked = 0
            try:
                await serve_once(new, ds, running)
                for number in range(3):
                    await leave(new, running)
                    await until(lambda: not len(new.ledger))
                    await until(lambda number=number: _told(running, number + 1))
                    await until(lambda: _forgotten(running, 0 if down else 1))
                assert old.asked == (0 if down else 1)
            finally:
                new.responder.close()

    run(scenario())


def test_a_prefill_engine_that_was_removed_and_added_again_is_not_told_where_it_was() -> None:
    async def scenario() -> None:
        async with keeping("--health-interval", "0.1") as (old, ds, running):
            await serve_once(old, ds, running)
            named = {"type": "prefill", "instances": old.prefill.address}
            assert (await running.post("/instances/remove", named)).json["removed"] == [old.prefill.address]
            assert (await running.post("/instances/add", named)).status == 202
            await until(lambda: _state(running, "ready"))
            old.asked = 0
            await leave(old, running)
            await running.is_idle()
            await asyncio.sleep(0.3)
            assert old.asked == 0, "nothing is known of the new one yet"
            assert len(old.ledger) == 1

    run(scenario())


async def _state(running: Running, wanted: str) -> bool:
    return any(one["type"] == "prefill" and one["state"] == wanted for one in (await running.instances()).values())
