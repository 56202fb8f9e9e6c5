"""Engines that are none: real HTTP servers on loopback that answer as vLLM does, and that can be told to misbehave."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web

WORDS = ["One", " two", " drei", " 四", " 🙂", " six"]


@dataclass
class Seen:
    """One request as it arrived."""

    path: str
    body: dict[str, Any]
    headers: dict[str, str]
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def params(self) -> dict[str, Any] | None:
        return self.body.get("kv_transfer_params")


class Engine:
    """`answer`: replaces the answer to completions and chat. `gate`: closed, every answer waits."""

    def __init__(self, side: str, host: str = "127.0.0.1") -> None:
        self.side, self.host, self.port = side, host, 0
        self.seen: list[Seen] = []
        self.resets: list[str] = []
        self.answer: Callable[[Seen, web.Request], Awaitable[web.StreamResponse]] | None = None
        self.gate = asyncio.Event()
        self.gate.set()
        self.health = 200
        self.reset_answer: tuple[int, dict[str, Any]] = (200, {"success": True})
        self.cached: int | None = 0
        self.words = list(WORDS)
        self.pause_s = 0.0
        self.now = self.most = 0
        self.delivered: dict[str, asyncio.Event] = {}
        self._runner: web.AppRunner | None = None
        self._session: aiohttp.ClientSession | None = None

    @property
    def address(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    async def start(self) -> Engine:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_post("/v1/completions", self._serve)
        app.router.add_post("/v1/chat/completions", self._serve)
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/version", self._version)
        app.router.add_post("/tokenize", self._echo)
        app.router.add_post("/detokenize", self._echo)
        app.router.add_post("/reset_prefix_cache", self._reset)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        site = web.TCPSite(self._runner, self.host, self.port, reuse_address=True)
        await site.start()
        self.port = site._server.sockets[0].getsockname()[1]
        return self

    async def stop(self) -> None:
        if self._runner is not None:
            runner, self._runner = self._runner, None
            await runner.cleanup()
        if self._session is not None:
            await self._session.close()

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(status=self.health)

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "tiny", "max_model_len": 600}]})

    async def _version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": "0.32.0"})

    async def _echo(self, request: web.Request) -> web.Response:
        """In place of tokenizing."""
        body = await request.text()
        if json.loads(body).get("model") == "large":
            return web.json_response({"error": "no such model"}, status=404)
        sent = {"path": request.path, "body": body, "authorization": request.headers.get("authorization")}
        return web.json_response(sent)

    async def _reset(self, request: web.Request) -> web.Response:
        self.resets.append(request.query_string)
        status, body = self.reset_answer
        return web.json_response(body, status=status)

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        seen = Seen(
            request.path, json.loads(await request.read()), {name.lower(): value for name, value in request.headers.items()}
        )
        self.seen.append(seen)
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            await self.gate.wait()
            if self.answer is not None:
                return await self.answer(seen, request)
            return await (self.prefill(seen, request) if self.side == "prefill" else self.decode(seen, request))
        except (asyncio.CancelledError, ConnectionError):
            seen.cancelled.set()
            raise
        finally:
            self.now -= 1

    async def prefill(self, seen: Seen, request: web.Request) -> web.StreamResponse:
        params = seen.params or {}
        if params.get("do_remote_decode") is not True:
            return web.json_response({"error": {"message": "no KV asked for", "code": 400}}, status=400)
        if "metaserver_host" in params:  # decode first: where the KV goes
            self.delivered.setdefault(params["transfer_id"], asyncio.Event()).set()
            found = None
        else:
            where = {"remote_engine_id": "P", "remote_block_ids": [[1, 2]], "transfer": f"KV of {prompt_of(seen.body)}"}
            found = {"do_remote_prefill": True, "do_remote_decode": False, **where}
        whole = self.whole(seen, "x", samples=1)
        return web.json_response({**whole, "kv_transfer_params": found})

    async def decode(self, seen: Seen, request: web.Request) -> web.StreamResponse:
        if not seen.body.get("stream"):
            await self.fetch(seen)
            return web.json_response({**self.whole(seen, self.text(seen)), "kv_transfer_params": None})
        response = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)  # vLLM, too, sends its headers before there is a token
        await self.fetch(seen)
        for frame in self.frames(seen):
            await response.write(frame)
            if self.pause_s:
                await asyncio.sleep(self.pause_s)
        await response.write_eof()
        return response

    async def fetch(self, seen: Seen) -> None:
        """Decode first: call the metaserver, and wait for prefill."""
        params = seen.params or {}
        if "metaserver" not in params:
            return
        call = {"request_id": f"{head(seen)}-{seen.headers['x-request-id']}-0", "do_remote_decode": True, "metaserver_host": "D"}
        call |= self.extra(params) if self.extra is not None else {}
        assert self._session is not None
        async with self._session.post(params["metaserver"], json=call) as answer:
            self.called = answer.status
        await self.delivered.setdefault(params["transfer_id"], asyncio.Event()).wait()

    extra: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    called: int | None = None

    def text(self, seen: Seen) -> str:
        return "".join(self.words) + f" <{prompt_of(seen.body)}>"

    def whole(self, seen: Seen, text: str, samples: int | None = None) -> dict[str, Any]:
        chat = "chat" in seen.path
        choices = [
            {
                "index": index,
                **({"message": {"role": "assistant", "content": text}} if chat else {"text": text}),
                "finish_reason": "stop",
            }
            for index in range(samples or seen.body.get("n") or 1)
        ]
        return {
            "id": f"{head(seen)}-{seen.headers.get('x-request-id')}",
            "object": "chat.completion" if chat else "text_completion",
            "model": seen.body.get("model"),
            "choices": choices,
            "usage": self.usage(len(choices)),
        }

    def usage(self, samples: int = 1) -> dict[str, Any]:
        completion = len(self.words) * samples
        usage: dict[str, Any] = {"prompt_tokens": 200, "completion_tokens": completion, "total_tokens": 200 + completion}
        if self.cached is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": self.cached}
        return usage

    def frames(self, seen: Seen) -> list[bytes]:
        """A stream as vLLM makes it."""
        chat, options = "chat" in seen.path, seen.body.get("stream_options") or {}
        base = {"id": f"{head(seen)}-{seen.headers['x-request-id']}", "object": "chunk", "model": seen.body.get("model")}
        chunks: list[dict[str, Any]] = []
        for word in [*self.words, f" <{prompt_of(seen.body)}>"]:
            choice = {"index": 0, **({"delta": {"content": word}} if chat else {"text": word}), "finish_reason": None}
            chunks.append({**base, "choices": [choice]})
        if options.get("include_usage"):
            chunks.append({**base, "choices": [], "usage": self.usage()})
        return [b"data: " + json.dumps(one, ensure_ascii=False).encode() + b"\n\n" for one in chunks] + [b"data: [DONE]\n\n"]


def head(seen: Seen) -> str:
    return "chatcmpl" if "chat" in seen.path else "cmpl"


def prompt_of(body: dict[str, Any]) -> str:
    return str(body["messages"][-1]["content"] if "messages" in body else body.get("prompt"))
