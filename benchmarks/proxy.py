"""What the proxy adds: 64 streams of 20 tokens a second through it, past it, and through another router, by turns.

The engines are stand-ins that keep a schedule (`proxy_engines.py`); every token says when it was sent, so that a late one is late
whatever the client does.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import aiohttp
import numpy as np

from benchmarks.overlay import overlay
from benchmarks.processes import server
from benchmarks.report import Report
from benchmarks.settings import Settings
from kvpool.ops.services.ports import free_ports

FIGURES = r"proxy_.*"
STREAMS, GAP_S, STAGGER_S = 64, 0.05, 0.02
ROUTER = ("vllm-router==0.1.17", "setproctitle==1.3.7", "orjson==3.11.4", "requests==2.32.5")
READY_S = 30.0


@dataclass
class Times:
    """Seconds: from sending a token to having it, from asking to the first byte."""

    tokens: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)


def run(report: Report, settings: Settings) -> None:
    rounds, tokens = (1, 20) if settings.quick else (5, 200)
    p, d = free_ports(2)
    with ExitStack() as stack:
        stack.enter_context(server([sys.executable, "-m", "benchmarks.proxy_engines", str(p), str(d)], {}, d))
        ways = {"direct": [f"http://127.0.0.1:{p}", f"http://127.0.0.1:{d}"]}
        ways["kvpool"] = [stack.enter_context(kvpool(p, d))]
        try:
            ways["router"] = [stack.enter_context(router(p, d))]
        except (RuntimeError, OSError) as error:
            report.missing("proxy_router_added_token_ms", str(error))
        measured = {name: Times() for name in ways}
        for turn in range(rounds + 1):
            for name in sorted(ways, reverse=turn % 2 == 1):
                times = asyncio.run(streams(ways[name], tokens if turn else 20))
                if turn:  # the first warms up
                    measured[name].tokens += times.tokens
                    measured[name].first += times.first
    publish(report, measured)


def publish(report: Report, measured: dict[str, Times]) -> None:
    direct = measured.pop("direct")
    for name, times in {"direct": direct, **measured}.items():
        prefix = "proxy_" if name == "kvpool" else f"proxy_{name}_"
        for kind, got, base in (("token", times.tokens, direct.tokens), ("first_byte", times.first, direct.first)):
            report.add(f"{prefix}{kind}_ms", quantile(got, 50) * 1e3)
            report.add(f"{prefix}{kind}_p99_ms", quantile(got, 99) * 1e3)
            if name != "direct":
                report.add(f"{prefix}added_{kind}_ms", (quantile(got, 50) - quantile(base, 50)) * 1e3)


def quantile(values: list[float], percent: float) -> float:
    return float(np.percentile(values, percent))


async def streams(urls: list[str], tokens: int) -> Times:
    """All streams at once, started one after another. RuntimeError where a token is lost."""
    times = Times()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=120)) as session:
        await asyncio.gather(*(stream(session, urls, number, tokens, times) for number in range(STREAMS)))
    if len(times.tokens) != STREAMS * tokens:
        raise RuntimeError(f"{len(times.tokens)} of {STREAMS * tokens} tokens came")
    return times


async def stream(session: aiohttp.ClientSession, urls: list[str], number: int, tokens: int, times: Times) -> None:
    """One stream. Without a proxy (two URLs) the client asks prefill and decode itself: the work of the engines is the same."""
    await asyncio.sleep(number * STAGGER_S)
    body = {"model": "timer", "prompt": f"prompt {number} " * 50, "max_tokens": tokens, "user": str(GAP_S), "stream": True}
    began, first = time.monotonic(), True
    for url in urls[:-1]:
        async with session.post(f"{url}/v1/completions", json={**body, "max_tokens": 1, "stream": False}) as answer:
            await answer.read()
    async with session.post(f"{urls[-1]}/v1/completions", json=body) as answer:
        rest = b""
        while chunk := await answer.content.readany():
            now = time.monotonic_ns()
            if first:
                times.first.append(time.monotonic() - began)
                first = False
            *frames, rest = (rest + chunk).split(b"\n\n")
            for frame in frames:
                if frame.startswith(b"data: {"):
                    times.tokens.append((now - int(json.loads(frame[6:])["choices"][0]["text"])) / 1e9)


@contextmanager
def kvpool(p: int, d: int) -> Iterator[str]:
    (port,) = free_ports(1)
    flags = f"--host 127.0.0.1 --port {port} --prefiller-hosts 127.0.0.1 --prefiller-ports {p}"
    flags += f" --decoder-hosts 127.0.0.1 --decoder-ports {d} --log-level warning"
    command = [sys.executable, "-c", "from kvpool.cli import app; app()", "proxy", *flags.split()]
    with server(command, {}, port):
        url = f"http://127.0.0.1:{port}"
        asyncio.run(ready(url))
        yield url


@contextmanager
def router(p: int, d: int) -> Iterator[str]:
    """vllm-router, whose prefill and decode mode for NIXL has the same two legs."""
    packages = overlay("vllm-router", ROUTER)
    port, metrics = free_ports(2)
    flags = f"--host 127.0.0.1 --port {port} --prometheus-port {metrics} --policy round_robin --log-level warning"
    flags += f" --vllm-pd-disaggregation --kv-connector nixl --prefill http://127.0.0.1:{p} --decode http://127.0.0.1:{d}"
    command = [sys.executable, "-m", "vllm_router.launch_router", *flags.split()]
    with server(command, {"PYTHONPATH": str(packages)}, port):
        url = f"http://127.0.0.1:{port}"
        asyncio.run(ready(url))
        yield url


async def ready(url: str) -> None:
    """Wait until a stream comes through. RuntimeError with what came instead."""
    end, last = time.monotonic() + READY_S, "no answer"
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as session:
        while time.monotonic() < end:
            try:
                await stream(session, [url], 0, 1, times := Times())
                if times.tokens:
                    return
            except (aiohttp.ClientError, OSError, ValueError) as error:
                last = f"{type(error).__name__}: {error}"
            await asyncio.sleep(0.2)
    raise RuntimeError(f"{url} did not stream within {READY_S:g} s: {last}")
