"""Decode first: the engine calls the metaserver, prefill follows, and whatever goes wrong on one side ends the other."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web

from kvpool.core.signed_fields import sign_fields, verify_fields
from tests.proxy.fakes import WORDS
from tests.proxy.harness import SECRET, engines, proxy, run, until

FLOW = {"mode": "decode-first"}


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("chat", [True, False])
def test_decode_calls_and_prefill_computes_into_it(stream, chat) -> None:
    async def scenario() -> None:
        async with engines() as (ps, ds), proxy(ps, ds, **FLOW) as running:
            ps[0].cached, ds[0].cached = 64, 199
            more = {"stream": stream, "stream_options": {"include_usage": True} if stream else None}
            answer = await (running.chat(**more) if chat else running.complete(**more))
            assert answer.status == 200
            assert ds[0].called == 202
            usage = answer.chunks[-1]["usage"] if stream else answer.json["usage"]
            assert usage["prompt_tokens_details"]["cached_tokens"] == 64
            (first,), (second,) = ds[0].seen, ps[0].seen
            assert first.params["do_remote_prefill"] is True
            assert second.params["transfer_id"] == first.params["transfer_id"]
            assert (second.params["metaserver_host"], second.params["do_remote_decode"]) == ("D", True)
            assert (second.body["max_tokens"], second.body["stream"]) == (1, False)
            await running.is_idle()

    run(scenario())


def test_every_prompt_and_sample_has_a_call_of_its_own() -> None:
    async def scenario() -> None:
        async with engines(2, 2) as (ps, ds), proxy(ps, ds, **FLOW) as running:
            answer = (await running.complete(["a", "b"], n=2)).json
            assert [choice["text"].rpartition("<")[2] for choice in answer["choices"]] == ["a>", "a>", "b>", "b>"]
            assert sum(len(one.seen) for one in ps) == 4
            streamed = await running.complete(["a", "b"], n=2, stream=True)
            assert streamed.body.endswith(b"[DONE]\n\n")
            await running.is_idle()

    run(scenario())


def test_an_engine_that_knows_the_transfer_id_is_found_by_it() -> None:
    async def scenario() -> None:
        async with engines() as (ps, ds), proxy(ps, ds, **FLOW) as running:
            ds[0].extra = lambda params: {"transfer_id": params["transfer_id"], "request_id": "mine"}
            assert (await running.complete()).status == 200

    run(scenario())


def test_a_failed_prefill_ends_decode_with_its_error() -> None:
    async def scenario() -> None:
        async with engines() as (ps, ds), proxy(ps, ds, **FLOW) as running:

            async def refuse(seen, request):
                return web.json_response({"error": {"message": "no"}}, status=422)

            ps[0].answer = refuse
            for more in ({"stream": True}, {}, {"n": 2, "stream": True}):
                answer = await running.complete(**more)
                assert (answer.status, answer.json) == (422, {"error": {"message": "no"}})
            await until(lambda: all(seen.cancelled.is_set() for seen in ds[0].seen))
            await running.is_idle()

    run(scenario())


def test_another_prefill_instance_serves_and_decode_starts_again_with_it() -> None:
    async def scenario() -> None:
        async with engines(2, 1) as (ps, ds), proxy(ps, ds, **FLOW) as running:

            async def fail(seen, request):
                request.transport.abort()
                return web.Response()

            async def slowly(seen, request):
                await asyncio.sleep(0.1)  # longer than a stale connection takes to break
                return await fail(seen, request)

            ps[0].answer = slowly
            for _ in range(3):
                answer = await running.complete(stream=True)
                assert answer.text == "".join(WORDS) + " <hello>"
            assert ps[0].seen
            ids = [seen.params["transfer_id"] for seen in ds[0].seen]
            assert len(ids) == len(set(ids)) == 3 + len(ps[0].seen)
            await running.is_idle()

    run(scenario())


def test_a_decode_engine_that_never_calls_ends_with_a_deadline() -> None:
    async def scenario() -> None:
        async with engines() as (ps, ds), proxy(ps, ds, "--first-byte-timeout", "1", **FLOW) as running:

            async def silent(seen, request):
                response = web.StreamResponse(headers={"content-type": "text/event-stream"})
                await response.prepare(request)
                await asyncio.sleep(60)
                return response

            ds[0].answer = silent
            assert (await running.complete(stream=True)).status == 504
            assert not ps[0].seen
            await running.is_idle()

    run(scenario())


def test_calls_that_belong_to_nothing_are_refused() -> None:
    async def scenario() -> None:
        async with engines() as (ps, ds), proxy(ps, ds, **FLOW) as running:

            async def call(data, **kwargs):
                async with running.session.post(running.metaserver, data=data, **kwargs) as answer:
                    return answer.status

            assert await call(b'{"request_id": "cmpl-' + b"0" * 32 + b'-0"}') == 404
            assert await call(b'{"request_id": 7}') == 404
            assert await call(b"[]") == 400
            assert await call(b"{") == 400
            assert await call(b"x" * (2 << 20)) == 413
            # Clients' listener and decoders' listener are two.
            async with running.session.post(f"{running.url}/v1/metaserver", json={}) as answer:
                assert answer.status == 404
            async with running.session.post(running.metaserver.replace("/v1/metaserver", "/v1/completions"), json={}) as answer:
                assert answer.status == 404
            # The id of a request that has ended is nothing any more; one that waits takes the first call only.
            ps[0].gate.clear()
            asked = asyncio.create_task(running.complete(stream=True))
            await until(lambda: len(ps[0].seen) == 1)
            again = b'{"transfer_id": "%s", "metaserver_host": "evil"}' % ds[0].seen[0].params["transfer_id"].encode()
            assert await call(again) == 202
            ps[0].gate.set()
            assert (await asked).status == 200
            assert len(ps[0].seen) == 1
            assert await call(again) == 404

    run(scenario())


def test_with_a_secret_calls_are_signed_in_both_directions() -> None:
    async def scenario() -> None:
        secret = SECRET.encode()
        async with (
            engines() as (ps, ds),
            proxy(ps, ds, "--first-byte-timeout", "3", env={"KVPOOL_SECRET": SECRET}, **FLOW) as running,
        ):
            assert (await running.complete(stream=True)).status == 504  # this engine does not sign
            assert ds[0].called == 401
            assert not ps[0].seen
            async with running.session.post(running.metaserver, json=sign_fields(secret, {"request_id": "x"})) as answer:
                assert answer.status == 404  # signed, but nobody waits for it
            ds[0].extra = lambda params: sign_fields(secret, {**ds_call(ds[0], params)})
            assert (await running.complete(stream=True)).status == 200
            for seen in (ds[0].seen[-1], ps[0].seen[-1]):
                assert verify_fields(secret, seen.params)
                assert not verify_fields(b"another secret", seen.params)

    def ds_call(engine, params):
        """What the engine sends, whole: a signature is over all of it."""
        seen = engine.seen[-1]
        call = {"request_id": f"cmpl-{seen.headers['x-request-id']}-0", "do_remote_decode": True, "metaserver_host": "D"}
        return {**call, "transfer_id": params["transfer_id"]}

    run(scenario())
