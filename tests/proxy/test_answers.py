"""What a client gets through the proxy is what one server would have answered, and what the engines get is what they should."""

from __future__ import annotations

import asyncio
import json

import pytest
from aiohttp import web

from kvpool.proxy import passing
from tests.proxy.fakes import WORDS, Engine
from tests.proxy.harness import Running, engines, proxy, run, until

SAID = "".join(WORDS) + " <hello>"


@pytest.mark.parametrize(
    ("stream", "kind"),
    [(True, "text/event-stream"), (False, "application/json"), (None, "application/json"), ("absent", "application/json")],
)
@pytest.mark.parametrize("chat", [False, True])
def test_bc_121_the_content_type_is_that_of_the_answer(stream, kind, chat) -> None:
    async def scenario() -> None:
        async with engines() as (ps, ds), proxy(ps, ds) as running:
            more = {} if stream == "absent" else {"stream": stream}
            answer = await (running.chat(**more) if chat else running.complete(**more))
            assert answer.status == 200
            assert answer.headers["content-type"].startswith(kind)
            if stream is True:
                assert answer.body.endswith(b"data: [DONE]\n\n")
                assert answer.text == SAID
            else:
                choice = answer.json["choices"][0]
                assert (choice["message"]["content"] if chat else choice["text"]) == SAID
                assert int(answer.headers["content-length"]) == len(answer.body)
            await running.is_idle()

    run(scenario())


def test_bc_126_bytes_of_a_stream_are_those_of_the_engine() -> None:
    async def scenario() -> None:
        async with engines() as (ps, ds), proxy(ps, ds) as running:
            answer = await running.complete(stream=True, stream_options={"include_usage": True})
            assert answer.body == b"".join(ds[0].frames(ds[0].seen[0]))

    run(scenario())


@pytest.mark.parametrize(
    ("chat", "asked"),
    [
        (False, {"min_tokens": 5, "max_tokens": 50}),
        (False, {"max_completion_tokens": 200, "temperature": 0.0}),
        (True, {"max_completion_tokens": 50, "stream": True, "stream_options": {"include_usage": True}}),
        (True, {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "auto"}),
        (True, {"response_format": {"type": "json_object"}, "stop": ["x"], "logprobs": True, "top_logprobs": 2}),
        (True, {}),
    ],
)
def test_bc_129_prefill_computes_one_token_and_decode_gets_what_was_asked(chat, asked) -> None:
    async def scenario() -> None:
        async with engines() as (ps, ds), proxy(ps, ds) as running:
            prompt = {"messages": [{"role": "user", "content": "hi"}]} if chat else {"prompt": "hi"}
            body = {"model": "tiny", **prompt, **asked}
            answer = await running.post("/v1/chat/completions" if chat else "/v1/completions", body)
            assert answer.status == 200
            (first,), (second,) = ps[0].seen, ds[0].seen
            assert (first.body["max_tokens"], first.body["min_tokens"], first.body["stream"]) == (1, 1, False)
            assert first.body.get("max_completion_tokens") == (1 if chat else None)
            assert "stream_options" not in first.body
            kept = {name: value for name, value in asked.items() if name in ("tools", "tool_choice", "response_format", "stop")}
            assert {name: first.body.get(name) for name in kept} == kept
            transfer = second.body.pop("kv_transfer_params")
            assert transfer["transfer"] == "KV of hi"
            assert second.body == body
            assert first.headers["x-request-id"] == second.headers["x-request-id"]

    run(scenario())


@pytest.mark.parametrize("cached", [0, None, 128])
@pytest.mark.parametrize("options", [None, {"stream": True}, {"stream": True, "stream_options": {"include_usage": True}}])
def test_bc_127_cached_tokens_are_those_of_prefill(cached, options) -> None:
    async def scenario() -> None:
        async with engines() as (ps, ds), proxy(ps, ds) as running:
            ps[0].cached, ds[0].cached = cached, 192  # what decode has fetched
            answer = await running.complete(**(options or {}))
            if options == {"stream": True}:
                assert not any("usage" in chunk for chunk in answer.chunks)
                return
            usage = answer.json["usage"] if options is None else answer.chunks[-1]["usage"]
            assert usage["prompt_tokens_details"]["cached_tokens"] == (cached or 0)
            assert (usage["prompt_tokens"], usage["completion_tokens"]) == (200, len(WORDS))

    run(scenario())


def test_usage_without_details_stays_without() -> None:
    async def scenario() -> None:
        async with engines() as (ps, ds), proxy(ps, ds) as running:
            ds[0].cached = None
            assert "prompt_tokens_details" not in (await running.complete()).json["usage"]

    run(scenario())


def test_prompts_and_samples_are_one_answer() -> None:
    async def scenario() -> None:
        async with engines(2, 2) as (ps, ds), proxy(ps, ds) as running:
            answer = (await running.complete(["a", "b", "c"], n=2, seed=7)).json
            assert [choice["index"] for choice in answer["choices"]] == list(range(6))
            said = [choice["text"].rpartition("<")[2] for choice in answer["choices"]]
            assert said == ["a>", "a>", "b>", "b>", "c>", "c>"]
            assert answer["usage"]["prompt_tokens"] == 600
            assert answer["usage"]["completion_tokens"] == 6 * len(WORDS)
            assert answer["id"].startswith("cmpl-")
            seen = [one for engine in ds for one in engine.seen]
            assert sorted((one.body["prompt"], one.body["seed"]) for one in seen) == [(p, s) for p in "abc" for s in (7, 8)]
            # Every unit has its own KV: that of the first prompt would be wrong for the others.
            assert all(one.params["transfer"] == f"KV of {one.body['prompt']}" for one in seen)
            assert len({one.headers["x-request-id"] for one in seen}) == 6
            await running.is_idle()

    run(scenario())


@pytest.mark.parametrize("chat", [False, True])
def test_prompts_and_samples_stream_together(chat) -> None:
    async def scenario() -> None:
        async with engines(1, 2) as (ps, ds), proxy(ps, ds) as running:
            ds[0].pause_s, ds[1].pause_s = 0.002, 0.02  # one ends long before the other
            more = {"stream": True, "stream_options": {"include_usage": True}, "n": 2}
            answer = await (running.chat("a", **more) if chat else running.complete([[1, 2], [3]], **more))
            chunks = answer.chunks
            count = 2 if chat else 4
            assert answer.body.endswith(b"data: [DONE]\n\n")
            assert answer.body.count(b"[DONE]") == 1
            assert len({chunk["id"] for chunk in chunks}) == 1
            texts = [""] * count
            for chunk in chunks[:-1]:
                for choice in chunk["choices"]:
                    texts[choice["index"]] += choice["delta"]["content"] if chat else choice["text"]
            prompts = ["a"] * 2 if chat else ["[1, 2]"] * 2 + ["[3]"] * 2
            assert texts == ["".join(WORDS) + f" <{prompt}>" for prompt in prompts]
            assert [chunk for chunk in chunks if "usage" in chunk] == chunks[-1:]
            assert chunks[-1]["usage"]["completion_tokens"] == count * len(WORDS)
            assert chunks[-1]["usage"]["prompt_tokens"] == (200 if chat else 400)
            await running.is_idle()

    run(scenario())


def test_prefill_is_rid_of_the_kv_with_the_first_byte() -> None:
    async def scenario() -> None:
        async with engines() as (ps, ds), proxy(ps, ds) as running:
            ds[0].gate.clear()
            stream = asyncio.create_task(running.complete("x" * 400, stream=True))
            await until(lambda: ds[0].now == 1)
            load = (await running.instances())[f"prefill {ps[0].address}"]
            assert (load["active_tokens"], load["held_tokens"]) == (0, 100)
            ds[0].words, ds[0].pause_s = ["x"] * 200, 0.2
            ds[0].gate.set()
            await until(lambda: _grows(running, f"decode {ds[0].address}", 100))
            load = (await running.instances())[f"prefill {ps[0].address}"]
            assert (load["requests"], load["active_tokens"], load["held_tokens"]) == (0, 0, 0)
            ds[0].pause_s = 0.0
            await stream
            await running.is_idle()

    async def _grows(running, name, tokens) -> bool:
        return (await running.instances())[name]["active_tokens"] > tokens

    run(scenario())


def test_tool_calls_pass_through() -> None:
    async def scenario() -> None:
        async with engines() as (ps, ds), proxy(ps, ds) as running:
            calls = [{"index": 0, "id": "call_1", "function": {"name": "f", "arguments": '{"a": "é"}'}}]
            frames = [
                {"choices": [{"index": 0, "delta": {"tool_calls": calls}}]},
                {"choices": [{"index": 0, "finish_reason": "tool_calls"}]},
            ]
            ds[0].frames = lambda seen: [b"data: " + json.dumps(one).encode() + b"\n\n" for one in frames] + [b"data: [DONE]\n\n"]
            answer = await running.chat(stream=True, tools=[{"type": "function", "function": {"name": "f"}}])
            assert answer.chunks == frames

    run(scenario())


def test_what_clients_must_not_say_is_dropped() -> None:
    async def scenario() -> None:
        async with engines() as (ps, ds), proxy(ps, ds) as running:
            evil = {"do_remote_prefill": True, "remote_host": "203.0.113.1", "remote_block_ids": [[7]]}
            for name in ("kv_transfer_params", "ec_transfer_params", "request_id"):
                more = {name: evil, "vllm_xargs": {"kv_transfer_params": "x", "mine": 1}}
                # beam search goes to decode alone: there, too, nothing of it arrives
                for beam in (False, True):
                    assert (await running.complete(use_beam_search=beam, **more)).status == 200
            raw = b'{"prompt": "hello", "kv_transfer_params": 1, "kv_transfer_params": {"remote_host": "203.0.113.1"}}'
            assert (await running.post("/v1/completions", raw)).status == 200
            for seen in ps[0].seen + ds[0].seen:
                assert "203.0.113.1" not in json.dumps(seen.body)
                assert "ec_transfer_params" not in seen.body
                assert seen.body.get("vllm_xargs") in (None, {"mine": 1})
            assert len(ps[0].seen) == 4

    run(scenario())


def test_bc_105_a_request_id_of_a_client_is_its_own_business() -> None:
    async def scenario() -> None:
        async with engines() as (ps, ds), proxy(ps, ds) as running:
            headers = {
                "X-Request-Id": "abc",
                "traceparent": "00-1-2-03",
                "X-data-parallel-rank": "1",
                "Authorization": "Bearer mine",
            }
            body = {"model": "tiny", "prompt": "hello"}
            answers = await asyncio.gather(*(running.post("/v1/completions", body, headers) for _ in range(2)))
            assert {answer.headers["x-request-id"] for answer in answers} == {"abc"}
            assert len({answer.json["id"] for answer in answers}) == 2
            for engine in (ps[0], ds[0]):
                ids = [one.headers["x-request-id"] for one in engine.seen]
                assert len(set(ids)) == 2
                assert "abc" not in ids
                assert {one.headers["authorization"] for one in engine.seen} == {"Bearer mine"}
                assert {one.headers["traceparent"] for one in engine.seen} == {"00-1-2-03"}
                assert not any("x-data-parallel-rank" in one.headers for one in engine.seen)

    run(scenario())


def test_the_key_for_engines_is_sent_where_a_client_has_none() -> None:
    async def scenario() -> None:
        async with engines() as (ps, ds), proxy(ps, ds, env={"OPENAI_API_KEY": "k"}) as running:
            await running.complete()
            assert {one.headers["authorization"] for one in ps[0].seen + ds[0].seen} == {"Bearer k"}

    run(scenario())


def test_what_engines_refuse_or_must_see_whole_goes_to_decode_alone() -> None:
    async def scenario() -> None:
        async with engines() as (ps, ds), proxy(ps, ds) as running:
            odd = [{"n": 0}, {"max_tokens": "9"}, {"min_tokens": 10}, {"stream_options": {}}, {"prompt_logprobs": 1}, {"stream": 1}]
            odd.append({"n": 2, "temperature": 0})  # as vLLM, which refuses that
            for more in odd:
                await running.complete(**more)
                assert ds[0].seen[-1].params is None
                assert {name: ds[0].seen[-1].body[name] for name in more} == more
            assert not ps[0].seen
            assert (await running.complete(["a"] * 300)).status == 400

    run(scenario())


def test_an_engine_that_stops_amid_its_models_keeps_no_connection(monkeypatch) -> None:
    gone = asyncio.Event()

    async def stops(self: Engine, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"{")
        try:
            await asyncio.sleep(60)
        finally:
            gone.set()
        return response

    monkeypatch.setattr(Engine, "_models", stops)
    monkeypatch.setattr(passing, "LOOK_UP_S", 1.0)

    async def scenario() -> None:
        async with engines() as (ps, ds), proxy(ps, ds) as running:
            assert (await running.get("/v1/models")).status == 504
            await until(gone.is_set)

    run(scenario())


def test_version_and_tokenizing_are_answered_by_a_decode_engine() -> None:
    async def scenario() -> None:
        async with engines(decode=2) as (ps, ds), proxy(ps, ds, "--max-body-bytes", "1000") as running:
            assert (await running.get("/version")).json == {"version": "0.32.0"}
            asked = b'{"prompt": "one two",  "model": "tiny"}'
            for path in ("/tokenize", "/detokenize"):
                answer = await running.post(path, asked, {"authorization": "Bearer mine"})
                assert answer.json == {"path": path, "body": asked.decode(), "authorization": "Bearer mine"}
            refused = await running.post("/tokenize", {"model": "large"})
            assert (refused.status, refused.json) == (404, {"error": "no such model"})
            for raw, status in ((b"[1]", 400), (b"", 400), (b'{"a": "' + b"x" * 2000 + b'"}', 413)):
                assert (await running.post("/tokenize", raw)).status == status
            await ds[0].stop()
            assert (await running.post("/tokenize", asked)).json["path"] == "/tokenize", "the other one is asked"
            await ds[1].stop()
            answer = await running.post("/tokenize", asked)
            assert answer.status in (502, 503)
            assert answer.json["error"]["code"] == answer.status
            await running.is_idle()

    run(scenario())


def test_tokenizing_waits_for_a_place_as_every_request() -> None:
    async def scenario() -> None:
        flags = ("--max-concurrency", "1", "--max-queue", "1", "--queue-timeout", "0.2")
        async with engines() as (ps, ds), proxy(ps, ds, *flags) as running:
            ds[0].gate.clear()
            other = asyncio.create_task(running.complete())
            await until(lambda: ds[0].now == 1)
            assert (await running.post("/tokenize", {})).status == 503
            ds[0].gate.set()
            assert (await other).status == 200
            assert (await running.post("/tokenize", {"prompt": "x"})).status == 200

    run(scenario())


def test_ping_is_health() -> None:
    async def scenario() -> None:
        async with engines() as (ps, ds), proxy(ps, ds, "--health-interval", "0.1") as running:
            assert (await running.get("/ping")).body == (await running.get("/health")).body
            assert (await running.get("/ping")).status == 200
            ds[0].health = 503
            await until(lambda: _is_ill(running), 10)

    run(scenario())


async def _is_ill(running: Running) -> bool:
    return (await running.get("/ping")).status == 503


def test_models_and_unknown_paths() -> None:
    async def scenario() -> None:
        async with engines() as (ps, ds), proxy(ps, ds) as running:
            assert (await running.get("/v1/models")).json["data"][0]["id"] == "tiny"
            for answer, status in ((await running.get("/v1/nothing"), 404), (await running.get("/v1/completions"), 405)):
                assert answer.status == status
                assert answer.json["error"]["code"] == status
            for raw in (b"", b"[1]", b"{", b"[" * 100_000, b'{"a": "\xff"}'):
                answer = await running.post("/v1/completions", raw)
                assert answer.status == 400
                assert "JSON" in answer.json["error"]["message"]

    run(scenario())
