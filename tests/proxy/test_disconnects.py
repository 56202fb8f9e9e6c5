"""Clients that go away: both engines are told, and no load stays behind."""

from __future__ import annotations

import asyncio
import json
import random

import pytest

from tests.proxy.harness import PATIENCE_S, engines, proxy, run, until


async def ask_and_leave(running, after_s: float, after_frames: int = 0, **more) -> None:
    """Close the connection after that time, or after so many frames."""
    body = {"model": "tiny", "prompt": "hello", "stream": True, **more}
    request = running.session.post(f"{running.url}/v1/completions", json=body)
    try:
        async with asyncio.timeout(after_s or None):
            answer = await request
            for _ in range(after_frames):
                await answer.content.readany()
            await asyncio.sleep(60 if after_s else 0)
    except TimeoutError:
        pass
    else:
        answer.close()


@pytest.mark.parametrize("mode", ["prefill-first", "decode-first"])
def test_bc_133_a_client_that_leaves_during_prefill_ends_it_at_once(mode) -> None:
    async def scenario() -> None:
        async with engines() as (ps, ds), proxy(ps, ds, mode=mode) as running:
            ps[0].gate.clear()
            asked = [asyncio.create_task(running.complete(stream=True)) for _ in range(20)]
            await until(lambda: len(ps[0].seen) == 20)
            for one in asked:
                one.cancel()
            await until(lambda: all(seen.cancelled.is_set() for seen in ps[0].seen))
            if mode == "prefill-first":
                assert not ds[0].seen
            else:
                await until(lambda: all(seen.cancelled.is_set() for seen in ds[0].seen))
            await running.is_idle()
            assert await running.metric("kvpool_proxy_requests_total", status="499") == 20

    run(scenario())


@pytest.mark.parametrize("mode", ["prefill-first", "decode-first"])
def test_bc_124_cancelled_requests_leave_no_load(mode) -> None:
    async def scenario() -> None:
        async with engines(2, 2) as (ps, ds), proxy(ps, ds, mode=mode) as running:
            dice = random.Random(1)
            for one in ds:
                one.pause_s = 0.02
            leaving = [ask_and_leave(running, dice.uniform(0.01, 0.4)) for _ in range(100)]
            staying = [running.complete("x" * dice.randrange(4000), stream=True, n=1 + index % 2) for index in range(100)]
            results = await asyncio.gather(*leaving, *staying)
            assert all(answer.body.endswith(b"[DONE]\n\n") for answer in results[100:])
            await running.is_idle()
            await until(lambda: not any(one.now for one in ps + ds))
            assert await running.metric("kvpool_proxy_running") == 0

    run(scenario())


def test_a_client_that_leaves_a_stream_ends_decode() -> None:
    async def scenario() -> None:
        async with engines() as (ps, ds), proxy(ps, ds) as running:
            ds[0].words, ds[0].pause_s = ["x"] * 1000, 0.2
            await ask_and_leave(running, 0, after_frames=2)
            await until(ds[0].seen[0].cancelled.is_set)
            await running.is_idle()

    run(scenario())


def test_a_client_that_leaves_a_whole_answer_ends_decode() -> None:
    async def scenario() -> None:
        async with engines() as (ps, ds), proxy(ps, ds) as running:
            ds[0].gate.clear()
            asked = asyncio.create_task(running.complete(n=3))
            await until(lambda: len(ds[0].seen) == 3)
            asked.cancel()
            await until(lambda: all(seen.cancelled.is_set() for seen in ds[0].seen))
            await running.is_idle()

    run(scenario())


def test_a_client_that_does_not_read_is_given_up() -> None:
    async def scenario() -> None:
        async with engines() as (ps, ds), proxy(ps, ds, "--idle-timeout", "1.5") as running:
            ds[0].words = ["x" * 100_000] * 400
            body = json.dumps({"model": "tiny", "prompt": "hello", "stream": True}).encode()
            host, port = running.url.removeprefix("http://").split(":")
            _, writer = await asyncio.open_connection(host, int(port), limit=1024)
            writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
            await until(lambda: bool(ds[0].seen))
            await until(ds[0].seen[0].cancelled.is_set)  # 40 MB do not fit into the buffers between
            await running.is_idle()
            assert await running.metric("kvpool_proxy_requests_total", status="499") == 1
            writer.close()

    run(scenario())


def test_a_client_that_never_sends_its_body_is_given_up() -> None:
    async def scenario() -> None:
        async with engines() as (ps, ds), proxy(ps, ds, "--body-timeout", "0.3") as running:
            host, port = running.url.removeprefix("http://").split(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(b'POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{"prompt"')
            assert (await asyncio.wait_for(reader.readline(), PATIENCE_S)).startswith(b"HTTP/1.1 408 ")
            writer.close()
            assert await running.metric("kvpool_proxy_requests_total", status="408") == 1

    run(scenario())
