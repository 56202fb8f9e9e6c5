"""Streams cut at any byte, and many of them at once."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest
from aiohttp import web

from tests.proxy.fakes import WORDS
from tests.proxy.harness import engines, proxy, run, until

TEXTS = [f'data: {{"choices": [{{"index": 0, "text": "{text}"}}]}}' for text in ("四🙂", "é")]
FRAMES = "".join(frame + "\n\n" for frame in (TEXTS[0], ": note", TEXTS[1], "data: [DONE]")).encode()


def in_pieces(cuts):
    """The frames, one write for each piece, far enough apart to arrive so."""

    async def answer(seen, request):
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        places = [0, *cuts, len(FRAMES)]
        for start, end in pairwise(places):
            await response.write(FRAMES[start:end])
            await asyncio.sleep(0.002)
        return response

    return answer


def test_bc_126_frames_and_characters_stay_whole_wherever_they_are_cut() -> None:
    async def scenario() -> None:
        async with engines() as (ps, ds), proxy(ps, ds) as running:
            for cut in range(1, len(FRAMES)):
                ds[0].answer = in_pieces([cut])
                async with running.session.post(f"{running.url}/v1/completions", json={"prompt": "x", "stream": True}) as answer:
                    parts = [part async for part, _ in answer.content.iter_chunks() if part]
                assert b"".join(parts) == FRAMES
                for part in parts:
                    part.decode()  # no character is cut in a piece that the client gets
            ds[0].answer = in_pieces(range(1, len(FRAMES)))
            assert (await running.complete(stream=True)).body == FRAMES
            merged = await running.complete(["a", "b"], stream=True)
            assert sorted(merged.text) == sorted("四🙂é" * 2)

    run(scenario())


def test_what_comes_after_the_last_frame_is_passed_on_too() -> None:
    async def scenario() -> None:
        async with engines() as (ps, ds), proxy(ps, ds) as running:

            async def answer(seen, request):
                return web.Response(body=b"data: 1\n\ndata: no end", content_type="text/event-stream")

            ds[0].answer = answer
            assert (await running.complete(stream=True)).body == b"data: 1\n\ndata: no end"

    run(scenario())


@pytest.mark.parametrize("mode", ["prefill-first", "decode-first"])
def test_256_streams_at_once(mode) -> None:
    async def scenario() -> None:
        async with engines(2, 2) as (ps, ds), proxy(ps, ds, mode=mode) as running:
            for one in ds:
                one.gate.clear()
            asked = [asyncio.create_task(running.complete(f"prompt {number}", stream=True)) for number in range(256)]
            await until(lambda: sum(one.now for one in ds) == 256)
            assert await running.metric("kvpool_proxy_running") == 256
            for one in ds:
                one.gate.set()
            answers = await asyncio.gather(*asked)
            for number, answer in enumerate(answers):
                assert answer.text == "".join(WORDS) + f" <prompt {number}>"
            assert {len(one.seen) for one in ds} == {128}  # equal load
            await running.is_idle()

    run(scenario())
