"""Back-pressure: a place, a bounded queue, and a time to come back."""

from __future__ import annotations

import asyncio

import pytest

from tests.proxy.harness import engines, proxy, run, until


def test_requests_queue_and_what_does_not_fit_comes_back_later() -> None:
    async def scenario() -> None:
        flags = ("--max-concurrency", "2", "--max-queue", "3")
        async with engines() as (ps, ds), proxy(ps, ds, *flags) as running:
            ps[0].gate.clear()
            asked = [asyncio.create_task(running.complete(stream=True)) for _ in range(5)]
            await until(lambda: _queued(running, 3))
            rejected = await running.complete()
            assert (rejected.status, rejected.json["error"]["type"]) == (429, "RateLimitError")
            assert int(rejected.headers["retry-after"]) >= 1
            assert len(ps[0].seen) == 2
            ps[0].gate.set()
            assert {answer.status for answer in await asyncio.gather(*asked)} == {200}
            assert ps[0].most == 2
            await running.is_idle()
            assert await running.metric("kvpool_proxy_requests_total", status="429") == 1

    run(scenario())


async def _queued(running, count) -> bool:
    return await running.metric("kvpool_proxy_queued") == count


def test_a_place_in_the_queue_has_a_deadline_and_is_left_by_those_who_go() -> None:
    async def scenario() -> None:
        flags = ("--max-concurrency", "1", "--max-queue", "2", "--queue-timeout", "2")
        async with engines() as (ps, ds), proxy(ps, ds, *flags) as running:
            ps[0].gate.clear()
            first = asyncio.create_task(running.complete())
            await until(lambda: len(ps[0].seen) == 1)
            leaving = asyncio.create_task(running.complete())
            await until(lambda: _queued(running, 1))
            leaving.cancel()
            await until(lambda: _queued(running, 0))
            late = await running.complete()
            assert (late.status, "waited 2 s for room for 1 answers" in late.json["error"]["message"]) == (503, True)
            assert int(late.headers["retry-after"]) >= 1
            ps[0].gate.set()
            assert (await first).status == 200
            assert (await running.complete()).status == 200
            assert len(ps[0].seen) == 2

    run(scenario())


@pytest.mark.parametrize("mode", ["prefill-first", "decode-first"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_request_with_more_answers_than_places_is_served_in_turns(mode, stream) -> None:
    async def scenario() -> None:
        async with engines() as (ps, ds), proxy(ps, ds, "--max-answers", "3", mode=mode) as running:
            ds[0].pause_s = 0.01
            wide = [asyncio.create_task(running.complete(["a", "b"], n=5, stream=stream)) for _ in range(2)]
            narrow = [asyncio.create_task(running.complete(stream=stream)) for _ in range(4)]
            answers = await asyncio.gather(*wide, *narrow)
            assert {answer.status for answer in answers} == {200}
            if stream:
                assert all(answer.body.endswith(b"[DONE]\n\n") for answer in answers)
            else:
                assert sorted(choice["index"] for choice in answers[0].json["choices"]) == list(range(10))
            assert max(ps[0].most, ds[0].most) <= 3, "more answers at once than --max-answers"
            assert len(ds[0].seen) == 24
            await running.is_idle()
            assert await running.metric("kvpool_proxy_answers") == 0

    run(scenario())


def test_what_a_wide_request_keeps_waiting_is_told_so() -> None:
    async def scenario() -> None:
        flags = ("--max-answers", "4", "--max-queue", "1", "--queue-timeout", "2")
        async with engines() as (ps, ds), proxy(ps, ds, *flags) as running:
            ps[0].gate.clear()
            wide = asyncio.create_task(running.complete(n=100))
            await until(lambda: len(ps[0].seen) == 4)
            waiting = asyncio.create_task(running.complete(n=2))
            await until(lambda: _queued(running, 1))
            refused = await running.complete()
            assert refused.status == 429
            assert "1 requests with 4 answers are running and 1 are waiting" in refused.json["error"]["message"]
            late = await waiting
            assert (late.status, "room for 2 answers" in late.json["error"]["message"]) == (503, True)
            ps[0].gate.set()
            assert len((await wide).json["choices"]) == 100
            assert (await running.complete(n=4)).status == 200
            assert ps[0].most == 4
            await running.is_idle()

    run(scenario())


def test_a_wide_request_that_gives_up_lets_smaller_ones_in() -> None:
    async def scenario() -> None:
        async with engines() as (ps, ds), proxy(ps, ds, "--max-answers", "2") as running:
            ps[0].gate.clear()
            first = asyncio.create_task(running.complete())
            await until(lambda: len(ps[0].seen) == 1)
            wide = asyncio.create_task(running.complete(n=2))
            await until(lambda: _queued(running, 1))
            small = asyncio.create_task(running.complete())
            await until(lambda: _queued(running, 2))
            assert len(ps[0].seen) == 1, "a small one went past the wide one"
            wide.cancel()
            await until(lambda: len(ps[0].seen) == 2)
            ps[0].gate.set()
            assert {(await first).status, (await small).status} == {200}
            await running.is_idle()

    run(scenario())


def test_a_request_that_decode_gets_whole_takes_the_places_of_all_its_answers() -> None:
    async def scenario() -> None:
        async with engines() as (ps, ds), proxy(ps, ds, "--max-answers", "4") as running:
            ds[0].gate.clear()
            whole = asyncio.create_task(running.complete(n=3, prompt_logprobs=0))
            await until(lambda: len(ds[0].seen) == 1)
            assert await running.metric("kvpool_proxy_answers") == 3
            second = asyncio.create_task(running.complete(n=2, use_beam_search=True))
            await until(lambda: _queued(running, 1))
            assert len(ds[0].seen) == 1
            ds[0].gate.set()
            assert [len((await one).json["choices"]) for one in (whole, second)] == [3, 2]
            await running.is_idle()

    run(scenario())


def test_large_requests_are_refused_before_they_are_read() -> None:
    async def scenario() -> None:
        async with engines() as (ps, ds), proxy(ps, ds, "--max-body-bytes", "1000") as running:
            assert (await running.complete("x" * 900)).status == 200
            assert (await running.complete("x" * 2000)).status == 413

            async def chunked():
                for _ in range(5):
                    yield b"x" * 500

            async with running.session.post(f"{running.url}/v1/completions", data=chunked()) as answer:
                assert answer.status == 413

    run(scenario())


def test_bodies_that_are_still_coming_count_too() -> None:
    async def scenario() -> None:
        async with engines() as (ps, ds), proxy(ps, ds, "--max-concurrency", "2", "--max-queue", "1") as running:
            host, port = running.url.removeprefix("http://").split(":")
            slow = [await asyncio.open_connection(host, int(port)) for _ in range(3)]
            for _, writer in slow:
                writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
            await asyncio.sleep(0.3)  # a request that came between them would take the place of the third
            await until(lambda: _answers(running, 429))
            for _, writer in slow:
                writer.close()
            await until(lambda: _answers(running, 200))

    run(scenario())


async def _answers(running, status) -> bool:
    return (await running.complete()).status == status
