"""Engines that come and go: waiting for them, adding, draining and removing, resetting, and who may do that."""

from __future__ import annotations

import asyncio

import pytest

from tests.proxy.fakes import Engine
from tests.proxy.harness import engines, proxy, run, until


async def change(running, what, side, *addresses, **headers):
    return await running.post(f"/instances/{what}", {"type": side, "instances": list(addresses)}, headers)


async def state(running, name) -> str | None:
    return (await running.instances()).get(name, {}).get("state")


def test_a_proxy_that_starts_before_its_engines_waits() -> None:
    async def scenario() -> None:
        async with engines() as (ps, ds):
            await ps[0].stop()
            ds[0].health = 503
            async with proxy(ps, ds, "--health-interval", "0.2", ready=False) as running:
                for answer in (await running.complete(), await running.chat(stream=True)):
                    assert (answer.status, answer.headers["retry-after"]) == (503, "5")
                    assert "no prefill instance is ready" in answer.json["error"]["message"]
                assert (await running.get("/health")).status == 503
                await ps[0].start()
                await until(lambda: _is(running, f"prefill {ps[0].address}", "ready"))
                assert "no decode instance" in (await running.complete()).json["error"]["message"]
                ds[0].health = 200
                await until(lambda: _is(running, f"decode {ds[0].address}", "ready"))
                assert (await running.get("/healthcheck")).json == {"status": "ok", "prefill_instances": 1, "decode_instances": 1}
                assert (await running.complete()).status == 200

    run(scenario())


async def _is(running, name, wanted) -> bool:
    return await state(running, name) == wanted


def test_bc_132_a_removed_instance_finishes_its_streams_and_gets_no_new_ones() -> None:
    async def scenario() -> None:
        async with engines(1, 2) as (ps, ds), proxy(ps, ds) as running:
            for one in ds:
                one.gate.clear()
            streams = [asyncio.create_task(running.complete(stream=True)) for _ in range(10)]
            await until(lambda: [one.now for one in ds] == [5, 5])
            removed = await change(running, "remove", "decode", ds[0].address)
            assert removed.json == {"removed": [], "draining": {ds[0].address: 5}, "unknown": []}
            streams += [asyncio.create_task(running.complete(stream=True)) for _ in range(5)]
            await until(lambda: ds[1].now == 10)
            assert await state(running, f"decode {ds[0].address}") == "draining"
            for one in ds:
                one.gate.set()
            assert all(answer.body.endswith(b"[DONE]\n\n") for answer in await asyncio.gather(*streams))
            assert len(ds[0].seen) == 5
            assert await state(running, f"decode {ds[0].address}") is None
            assert (await change(running, "remove", "decode", ds[1].address)).json["removed"] == [ds[1].address]
            last = await running.complete()
            assert (last.status, "no decode instance is ready" in last.json["error"]["message"]) == (503, True)
            assert (await change(running, "add", "decode", ds[0].address)).status == 202  # the same port again
            await until(lambda: _is(running, f"decode {ds[0].address}", "ready"))
            assert (await running.complete()).status == 200

    run(scenario())


def test_bc_132_an_instance_that_does_not_answer_is_waited_for_and_given_up() -> None:
    async def scenario() -> None:
        flags = ("--max-waiting-retries", "2", "--waiting-retry-interval", "1", "--health-interval", "0.1")
        async with engines() as (ps, ds), proxy(ps, ds, *flags) as running:
            late = await Engine("decode").start()
            await late.stop()
            answer = await change(running, "add", "decode", late.address, ds[0].address, late.address)
            assert answer.json == {"waiting": [late.address], "known": [ds[0].address], "give_up_seconds": 2.0}
            assert (await running.complete()).status == 200
            await until(lambda: _is(running, f"decode {late.address}", None))
            await change(running, "add", "decode", late.address)
            await late.start()
            await until(lambda: _is(running, f"decode {late.address}", "ready"))
            await asyncio.sleep(2.2)
            assert await state(running, f"decode {late.address}") == "ready"
            again = await change(running, "add", "decode", late.address)
            assert (again.status, again.json["waiting"]) == (200, [])
            await late.stop()

    run(scenario())


def test_a_drain_has_a_deadline_and_can_be_taken_back() -> None:
    async def scenario() -> None:
        async with engines(1, 2) as (ps, ds), proxy(ps, ds, "--drain-timeout", "0.3", "--health-interval", "0.1") as running:
            ds[0].gate.clear()
            stream = asyncio.create_task(running.complete(stream=True))
            await until(lambda: ds[0].now == 1)
            await change(running, "remove", "decode", ds[0].address)
            await change(running, "add", "decode", ds[0].address)
            await until(lambda: _is(running, f"decode {ds[0].address}", "ready"))
            await change(running, "remove", "decode", ds[0].address)
            await until(lambda: _is(running, f"decode {ds[0].address}", None))
            ds[0].gate.set()
            assert (await stream).body.endswith(b"[DONE]\n\n")  # forgotten, not cut off
            await running.is_idle()

    run(scenario())


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"type": "both", "instances": ["a:1"]},
        {"type": "decode", "instances": []},
        {"type": "decode", "instances": ["127.0.0.1"]},
        {"type": "decode", "instances": ["127.0.0.1:0"]},
        {"type": "decode", "instances": ["127.0.0.1127.0.0.2:80"]},
        {"type": "decode", "instances": [1]},
        [],
    ],
)
def test_bad_instances_are_refused_in_one_line(body) -> None:
    async def scenario() -> None:
        async with engines() as (ps, ds), proxy(ps, ds) as running:
            answer = await running.post("/instances/add", body)
            assert answer.status == 400
            assert "\n" not in answer.json["error"]["message"]
            assert len(await running.instances()) == 2
            unknown = await change(running, "remove", "decode", "127.0.0.1:9")
            assert (unknown.status, unknown.json["unknown"]) == (404, ["127.0.0.1:9"])

    run(scenario())


def test_bc_131_a_reset_reaches_all_and_names_those_that_fail() -> None:
    async def scenario() -> None:
        async with engines(2, 2) as (ps, ds), proxy(ps, ds) as running:
            ok = await running.post("/reset_prefix_cache?reset_external=true", {})
            assert (ok.status, ok.json) == (200, {"success": True, "instances": 4, "failed": {}})
            assert [one.resets for one in ps + ds] == [["reset_external=true"]] * 4
            ps[0].reset_answer = (200, {"success": False})
            ps[1].reset_answer = (404, {})
            await ds[1].stop()
            failed = await running.post("/reset_prefix_cache?reset_external=true", {})
            assert failed.status == 500
            assert set(failed.json["failed"]) == {f"prefill {ps[0].address}", f"prefill {ps[1].address}", f"decode {ds[1].address}"}
            assert "success: false" in failed.json["failed"][f"prefill {ps[0].address}"]
            assert len(ds[0].resets) == 2

    run(scenario())


PATHS = [("POST", "/instances/add"), ("POST", "/instances/remove"), ("GET", "/instances"), ("POST", "/reset_prefix_cache")]


@pytest.mark.parametrize(("method", "path"), PATHS)
def test_administration_is_closed_off_loopback_and_open_with_the_token(method, path) -> None:
    async def ask(running, **headers):
        async with running.session.request(method, running.url + path, json={}, headers=headers) as answer:
            return answer.status

    async def scenario() -> None:
        async with engines() as (ps, ds):
            async with proxy(ps, ds, host="0.0.0.0") as running:
                assert await ask(running) == 403
            async with proxy(ps, ds, host="0.0.0.0", env={"KVPOOL_ADMIN_TOKEN": "t"}) as running:
                assert await ask(running) == 401
                assert await ask(running, authorization="Bearer x") == 401
                assert await ask(running, authorization="Bearer t") in (200, 400)
            async with proxy(ps, ds, env={"KVPOOL_ADMIN_TOKEN": "t"}) as running:
                assert await ask(running) == 401  # a token holds on loopback too
            async with proxy(ps, ds) as running:
                assert await ask(running) in (200, 400)
                assert await ask(running, origin="http://a-page.example") == 403

    run(scenario())


@pytest.mark.parametrize("named", ["::1", "[::1]", "localhost", "127.0.0.1"])
def test_bc_130_engines_are_reached_by_any_kind_of_address(named) -> None:
    async def scenario() -> None:
        listening = "::1" if "::1" in named else "127.0.0.1"
        p, d = Engine("prefill", listening), Engine("decode", listening)
        try:
            await p.start()
            await d.start()
        except OSError:
            pytest.skip(f"this host has no {listening}")
        async with proxy([p], [d], named=named) as running:
            assert (await running.complete()).status == 200
            shown = "[::1]" if "::1" in named else named
            assert set(await running.instances()) == {f"prefill {shown}:{p.port}", f"decode {shown}:{d.port}"}
        await p.stop()
        await d.stop()

    run(scenario())


def test_prefix_affinity_keeps_conversations_together() -> None:
    async def scenario() -> None:
        async with engines(3, 1) as (ps, ds):
            for flags, spread in ((("--prefix-affinity",), 1), ((), 3)):
                async with proxy(ps, ds, *flags) as running:
                    for one in ps:
                        one.seen.clear()
                    for turn in range(6):
                        await running.complete("a long system prompt " * 200 + f"turn {turn}")
                    assert sum(bool(one.seen) for one in ps) == spread

    run(scenario())
