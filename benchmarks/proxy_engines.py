"""python -m benchmarks.proxy_engines PREFILL_PORT DECODE_PORT: stand-ins for engines that keep time.

Prefill answers at once. Decode sends a token on schedule, whatever became of those before; each says when it was sent.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time

from aiohttp import web


async def prefill(request: web.Request) -> web.Response:
    await request.read()
    params = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": "p",
        "remote_block_ids": [1],
        "remote_host": "h",
    }
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    choice = {"index": 0, "text": "x", "finish_reason": "length", "logprobs": None}
    kv = {**params, "remote_port": 1, "remote_request_id": "r", "tp_size": 1}
    return web.json_response(
        {"id": "cmpl-p", "object": "text_completion", "choices": [choice], "usage": usage, "kv_transfer_params": kv}
    )


async def decode(request: web.Request) -> web.StreamResponse:
    body = await request.json()
    gap, count = float(body["user"]), int(body["max_tokens"])
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await response.prepare(request)
    start = time.monotonic()
    for number in range(count):
        await asyncio.sleep(max(0.0, start + number * gap - time.monotonic()))
        text = json.dumps({"id": "cmpl-d", "choices": [{"index": 0, "text": str(time.monotonic_ns()), "finish_reason": None}]})
        await response.write(f"data: {text}\n\n".encode())
    await response.write(b"data: [DONE]\n\n")
    return response


async def health(request: web.Request) -> web.Response:
    return web.Response()


async def models(request: web.Request) -> web.Response:
    return web.json_response({"object": "list", "data": [{"id": "timer", "object": "model", "owned_by": "bench"}]})


async def main() -> None:
    for port, handler in zip(map(int, sys.argv[1:3]), (prefill, decode), strict=True):
        app = web.Application()
        app.router.add_post("/v1/completions", handler)
        app.router.add_get("/health", health)
        app.router.add_get("/v1/models", models)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
