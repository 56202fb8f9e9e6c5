"""Errors before and after the first byte, dead and slow engines: the client is told, nothing is told twice, no load stays."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web

from kvpool.ops.services.ports import free_port
from tests.proxy.fakes import WORDS, Engine
from tests.proxy.harness import PATIENCE_S, engines, proxy, run, until

REFUSED = {"error": {"message": "context too long: 9000 > 4096", "type": "BadRequestError", "code": 400}}


def refusing(status, body=REFUSED, **headers):
    async def answer(seen, request):
        return web.json_response(body, status=status, headers=headers)

    return answer


def streaming(*frames, end="eof"):
    """A stream of these frames that ends well, breaks off or stays silent."""

    async def answer(seen, request):
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for frame in frames:
            await response.write(frame)
            await asyncio.sleep(0.01)
        if end == "break":
            request.transport.abort()
        if end == "silent":
            await asyncio.sleep(60)
        return response

    return answer


async def dead() -> Engine:
    """An address on which nobody listens."""
    engine = Engine("prefill")
    engine.port = free_port()
    return engine


@pytest.mark.parametrize(("status", "headers"), [(400, {}), (404, {}), (422, {}), (429, {"Retry-After": "7"}), (503, {})])
@pytest.mark.parametrize("stream", [False, True])
def test_bc_122_what_prefill_refuses_the_client_gets_as_it_is(status, headers, stream) -> None:
    async def scenario() -> None:
        async with engines() as (ps, ds), proxy(ps, ds) as running:
            ps[0].answer = refusing(status, **headers)
            answer = await running.complete(stream=stream)
            assert (answer.status, answer.json) == (status, REFUSED)
            assert answer.headers["content-type"].startswith("application/json")
            assert answer.headers.get("retry-after") == headers.get("Retry-After")
            assert not ds[0].seen
            await running.is_idle()

    run(scenario())


@pytest.mark.parametrize("status", [400, 429, 500])
def test_what_decode_refuses_the_client_gets_as_it_is(status) -> None:
    async def scenario() -> None:
        async with engines() as (ps, ds), proxy(ps, ds) as running:
            ds[0].answer = refusing(status)
            for more in ({"stream": True}, {}, {"n": 2}):
                answer = await running.complete(**more)
                assert (answer.status, answer.json) == (status, REFUSED)
            await running.is_idle()

    run(scenario())


@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize("failing", [refusing(500), refusing(503), streaming(end="break")])
def test_another_instance_serves_what_one_fails_before_the_first_byte(side, failing) -> None:
    async def scenario() -> None:
        async with engines(2, 2) as (ps, ds), proxy(ps, ds) as running:
            some = ps if side == "prefill" else ds
            some[0].answer = failing
            for _ in range(4):
                answer = await running.complete(stream=True)
                assert answer.status == 200
                assert answer.text == "".join(WORDS) + " <hello>"
            assert some[0].seen
            assert len({one.headers["x-request-id"] for one in ps[0].seen + ps[1].seen}) == len(ps[0].seen + ps[1].seen)
            assert await running.metric("kvpool_proxy_restarts_total") == len(some[0].seen)
            await running.is_idle()

    run(scenario())


def test_the_second_try_avoids_who_failed_also_where_all_others_are_busier() -> None:
    async def scenario() -> None:
        async with engines(2, 1) as (ps, ds), proxy(ps, ds) as running:
            for one in ps:
                one.gate.clear()
            large = asyncio.create_task(running.complete("x" * 40_000))
            await until(lambda: ps[0].now + ps[1].now == 1)
            busy, idle = (ps[0], ps[1]) if ps[0].now else (ps[1], ps[0])
            idle.answer = refusing(500)
            idle.gate.set()
            small = asyncio.create_task(running.complete())
            await until(lambda: len(busy.seen) == 2)
            assert len(idle.seen) == 1
            busy.gate.set()
            assert [answer.status for answer in await asyncio.gather(large, small)] == [200, 200]

    run(scenario())


def test_a_request_that_was_sent_is_sent_at_most_twice() -> None:
    async def scenario() -> None:
        async with engines(3, 1) as (ps, ds), proxy(ps, ds) as running:
            for one in ps:
                one.answer = refusing(500)
            assert (await running.complete()).status == 500
            assert sum(len(one.seen) for one in ps) == 2
            await running.is_idle()

    run(scenario())


@pytest.mark.parametrize("more", [{}, {"n": 2}])
def test_after_the_first_byte_a_broken_stream_ends_with_an_error_and_is_not_tried_again(more) -> None:
    async def scenario() -> None:
        async with engines(1, 2) as (ps, ds), proxy(ps, ds) as running:
            whole = b'data: {"choices": [{"index": 0, "text": "One"}]}\n\n'
            for one in ds:
                one.answer = streaming(whole, b'data: {"choi', end="break")
            answer = await running.complete(stream=True, **more)
            assert answer.status == 200
            assert answer.chunks[0]["choices"][0]["text"] == "One"
            assert answer.chunks[-1]["error"]["code"] == 502
            assert b"[DONE]" not in answer.body
            assert b'data: {"choi\n' not in answer.body
            assert sum(len(one.seen) for one in ds) == more.get("n", 1)
            assert await running.metric("kvpool_proxy_broken_streams_total") == 1
            await running.is_idle()

    run(scenario())


def test_an_answer_that_breaks_off_is_no_answer() -> None:
    async def scenario() -> None:
        async with engines() as (ps, ds), proxy(ps, ds) as running:

            async def answer(seen, request):
                response = web.StreamResponse(headers={"content-type": "application/json", "content-length": "1000"})
                await response.prepare(request)
                await response.write(b'{"choices": [')
                await asyncio.sleep(0.01)
                request.transport.abort()
                return response

            ds[0].answer = answer
            failed = await running.complete()
            assert failed.status == 502
            assert "broke off" in failed.json["error"]["message"]
            await running.is_idle()

    run(scenario())


@pytest.mark.parametrize("body", [b"no json", b"[]", b"[" * 100_000])
def test_nonsense_of_prefill_is_a_bad_gateway(body) -> None:
    async def scenario() -> None:
        async with engines() as (ps, ds), proxy(ps, ds) as running:

            async def answer(seen, request):
                return web.Response(body=body, content_type="application/json")

            ps[0].answer = answer
            assert (await running.complete()).status == 502
            assert not ds[0].seen

    run(scenario())


def test_without_kv_from_prefill_decode_computes() -> None:
    async def scenario() -> None:
        async with engines() as (ps, ds), proxy(ps, ds) as running:
            ps[0].answer = refusing(200, {"choices": [], "kv_transfer_params": None})
            assert (await running.complete()).status == 200
            assert ds[0].seen[0].params is None

    run(scenario())


def test_a_dead_instance_is_left_out_and_the_others_serve() -> None:
    async def scenario() -> None:
        async with engines(1, 1) as (ps, ds):
            gone = await dead()
            async with proxy([gone, *ps], ds, ready=False) as running:
                await until(lambda: _is(running, f"prefill {ps[0].address}", "ready"))
                await until(lambda: _is(running, f"decode {ds[0].address}", "ready"))
                answers = await asyncio.gather(*(running.complete() for _ in range(6)))
                assert {answer.status for answer in answers} == {200}
                assert (await running.instances())[f"prefill {gone.address}"]["state"] == "waiting"

    run(scenario())


def test_an_instance_that_dies_is_replaced_at_once_and_found_again_on_its_port() -> None:
    async def scenario() -> None:
        async with engines(2, 1) as (ps, ds), proxy(ps, ds, "--health-interval", "0.2") as running:
            await ps[0].stop()
            for _ in range(8):  # requests find out before a probe does
                assert (await running.complete()).status == 200
            await until(lambda: _is(running, f"prefill {ps[0].address}", "down"))
            await ps[1].stop()
            await until(lambda: _is(running, f"prefill {ps[1].address}", "down"))
            answer = await running.complete()
            assert (answer.status, answer.headers["retry-after"]) == (503, "5")
            await ps[0].start()
            await until(lambda: _is(running, f"prefill {ps[0].address}", "ready"))
            assert (await running.complete()).status == 200
            await running.is_idle()

    run(scenario())


async def _is(running, name, state) -> bool:
    return (await running.instances())[name]["state"] == state


@pytest.mark.parametrize(
    ("side", "flag", "stream"),
    [("prefill", "prefill", False), ("decode", "first-byte", True), ("decode", "request", False), ("decode", "idle", True)],
)
def test_slow_engines_end_with_a_deadline(side, flag, stream) -> None:
    async def scenario() -> None:
        async with engines(1, 1) as (ps, ds), proxy(ps, ds, f"--{flag}-timeout", "1") as running:
            slow = ps[0] if side == "prefill" else ds[0]
            slow.answer = streaming(*([b"data: {}\n\n"] if flag == "idle" else []), end="silent")
            answer = await running.complete(stream=stream)
            error = answer.chunks[-1]["error"] if flag == "idle" else answer.json["error"]
            assert error["code"] == 504
            assert answer.status == (200 if flag == "idle" else 504)
            await asyncio.wait_for(slow.seen[0].cancelled.wait(), PATIENCE_S)  # and the engine is told
            await running.is_idle()

    run(scenario())


@pytest.mark.parametrize("again", [True, False])
def test_an_error_as_the_first_frame_is_an_error_before_the_first_byte(again) -> None:
    async def scenario() -> None:
        async with engines(1, 2) as (ps, ds), proxy(ps, ds) as running:
            error = b'data: {"error": {"message": "KV load failed", "code": 500}}\n\ndata: [DONE]\n\n'
            for one in ds[: 1 if again else 2]:
                one.answer = streaming(error)
            answers = [await running.complete(stream=True) for _ in range(2)]
            if again:
                assert {answer.text for answer in answers} == {"".join(WORDS) + " <hello>"}
            else:
                assert {answer.status for answer in answers} == {500}
                assert answers[0].json["error"]["message"] == "KV load failed"
            await running.is_idle()

    run(scenario())


@pytest.mark.parametrize("number", [str(2**70), "1e999", "-1e400"])
def test_numbers_that_cannot_be_passed_on_are_refused(number) -> None:
    async def scenario() -> None:
        async with engines() as (ps, ds), proxy(ps, ds) as running:
            answer = await running.post("/v1/completions", b'{"prompt": "x", "seed": %s}' % number.encode())
            assert answer.status in (200, 400)
            if answer.status == 200:
                assert ps[0].seen[0].body["seed"] == 2**70  # exactly, or not at all
            await running.is_idle()

    run(scenario())


def test_redirects_are_not_followed() -> None:
    async def scenario() -> None:
        async with engines() as (ps, ds), proxy(ps, ds) as running:

            async def elsewhere(seen, request):
                return web.Response(status=307, headers={"location": f"http://{ds[0].address}/v1/completions"})

            ps[0].answer = elsewhere
            assert (await running.complete()).status == 502
            assert not ds[0].seen

    run(scenario())
