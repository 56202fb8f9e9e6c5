"""A proxy that listens on loopback, in the loop of the test, with engines behind it."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp

from kvpool.proxy import listeners, server
from kvpool.proxy.flags import read_flags
from tests.proxy.fakes import Engine

LIMIT_S = 120.0
PATIENCE_S = 30.0  # a loaded machine, too, is done long before; shorter than what the fakes sleep
SECRET = "a secret of the test suite"


def run(scenario: Coroutine[Any, Any, None]) -> None:
    """With a deadline; a task that outlives its scenario fails the test."""

    async def bounded() -> None:
        await asyncio.wait_for(scenario, LIMIT_S)
        await until(lambda: len(asyncio.all_tasks()) == 1)

    asyncio.run(bounded())


@dataclass
class Answered:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def chunks(self) -> list[dict[str, Any]]:
        """Of a stream, without its end mark."""
        lines = [line[6:] for line in self.body.decode().split("\n") if line.startswith("data: ")]
        return [json.loads(line) for line in lines if line != "[DONE]"]

    @property
    def text(self) -> str:
        """What a stream says."""
        choices = [choice for chunk in self.chunks for choice in chunk.get("choices", [])]
        return "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices)


class Running:
    """`url`: of the proxy; `session`: a client without limits."""

    def __init__(self, url: str, metaserver: str, session: aiohttp.ClientSession) -> None:
        self.url, self.metaserver, self.session = url, metaserver, session

    async def post(self, path: str, body: Any, headers: dict[str, str] | None = None) -> Answered:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        sent = {"content-type": "application/json", **(headers or {})}
        async with self.session.post(self.url + path, data=data, headers=sent) as answer:
            return Answered(answer.status, {k.lower(): v for k, v in answer.headers.items()}, await answer.read())

    async def get(self, path: str, headers: dict[str, str] | None = None) -> Answered:
        async with self.session.get(self.url + path, headers=headers) as answer:
            return Answered(answer.status, {k.lower(): v for k, v in answer.headers.items()}, await answer.read())

    async def complete(self, prompt: Any = "hello", **more: Any) -> Answered:
        return await self.post("/v1/completions", {"model": "tiny", "prompt": prompt, "max_tokens": 9, **more})

    async def chat(self, content: str = "hello", **more: Any) -> Answered:
        messages = [{"role": "user", "content": content}]
        return await self.post("/v1/chat/completions", {"model": "tiny", "messages": messages, **more})

    async def instances(self) -> dict[str, dict[str, Any]]:
        return {f"{one['type']} {one['instance']}": one for one in (await self.get("/instances")).json["instances"]}

    async def is_idle(self) -> None:
        """All load has been given back, exactly."""

        async def idle() -> bool:
            loads = [(one["requests"], one["active_tokens"], one["held_tokens"]) for one in (await self.instances()).values()]
            return all(load == (0, 0, 0) for load in loads)

        await until(idle)

    async def metric(self, name: str, **labels: str) -> float:
        """The sum of what fits."""
        total = 0.0
        for line in (await self.get("/metrics")).body.decode().splitlines():
            if line.partition("{")[0].partition(" ")[0] == name and all(f'{k}="{v}"' in line for k, v in labels.items()):
                total += float(line.rpartition(" ")[2])
        return total


async def until(condition: Any, limit_s: float = PATIENCE_S) -> None:
    """Wait until an asynchronous or ordinary condition holds."""
    async with asyncio.timeout(limit_s):
        while True:
            result = condition()
            if await result if asyncio.iscoroutine(result) else result:
                return
            await asyncio.sleep(0.02)


@asynccontextmanager
async def engines(prefill: int = 1, decode: int = 1) -> AsyncIterator[tuple[list[Engine], list[Engine]]]:
    """Started fakes. All of them know what prefill has delivered."""
    ps = [await Engine("prefill").start() for _ in range(prefill)]
    ds = [await Engine("decode").start() for _ in range(decode)]
    for one in ps + ds:
        one.delivered = ps[0].delivered
    try:
        yield ps, ds
    finally:
        for one in ps + ds:
            await one.stop()


@asynccontextmanager
async def proxy(
    ps: Sequence[Engine],
    ds: Sequence[Engine],
    *flags: str,
    mode: str = "prefill-first",
    env: dict[str, str] | None = None,
    ready: bool = True,
    host: str = "127.0.0.1",
    named: str | None = None,
) -> AsyncIterator[Running]:
    """A proxy with these engines and flags; `ready`: wait until it has seen them all; `named`: what the flags call
    the engines' host."""
    given = ["--host", host, "--port", "1"]
    for side, some in (("prefiller", ps), ("decoder", ds)):
        given += [f"--{side}-hosts", *(named or one.host for one in some), f"--{side}-ports", *(str(one.port) for one in some)]
    options = read_flags("proxy", [*given, *flags], env or {}, mode)
    sockets = listeners.bind(host, 0, "--port")
    called = listeners.bind("127.0.0.1", 0, "--metaserver-port") if mode == "decode-first" else []
    ended = asyncio.Event()
    task = asyncio.create_task(server.serve(options, sockets, called, ended))
    metaserver = f"http://127.0.0.1:{listeners.port_of(called)}/v1/metaserver" if called else ""
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(connector=connector, auto_decompress=False) as session:
        running = Running(f"http://127.0.0.1:{listeners.port_of(sockets)}", metaserver, session)
        try:
            if ready:
                wanted = {"prefill_instances": len(ps), "decode_instances": len(ds)}
                await until(lambda: _sees(running, wanted))
            yield running
        finally:
            ended.set()
            await asyncio.wait_for(task, PATIENCE_S)


async def _sees(running: Running, wanted: dict[str, int]) -> bool:
    found = (await running.get("/health")).json
    return {name: found[name] for name in wanted} == wanted


def clean_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(("KVPOOL_", "OPENAI_"))}
