"""A proxy as a process: its listeners, its signals, its end."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import uvicorn
from starlette.applications import Starlette

from kvpool.proxy import flags, listeners, logs
from kvpool.proxy.addresses import Address
from kvpool.proxy.app import Proxy
from kvpool.proxy.options import DECODE_FIRST, ProxyOptions

KEEP_ALIVE_S = 75


class _Server(uvicorn.Server):
    """Signals are handled once, for both listeners."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def run(options: ProxyOptions) -> None:
    """Until SIGINT or SIGTERM. OptionError where it cannot listen."""
    sockets = listeners.bind(options.host, options.port, "--port")
    called: list[socket.socket] = []
    try:
        if options.mode == DECODE_FIRST:
            called = listeners.bind(options.metaserver_host, options.metaserver_port, "--metaserver-port")
        logs.set_up(options.log_level)
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(serve(options, sockets, called))
    finally:
        listeners.close(sockets + called)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's, where it is installed, as beside vLLM."""
    try:
        import uvloop
    except ModuleNotFoundError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


async def serve(
    options: ProxyOptions, sockets: list[socket.socket], called: list[socket.socket], ended: asyncio.Event | None = None
) -> None:
    """Serve on bound sockets until ``ended`` is set or, without it, a signal comes."""
    proxy = Proxy(options, listeners.port_of(called) if called else 0)
    await proxy.open()
    try:
        servers = [(_server(proxy.app(), options), sockets)]
        if called:
            servers.append((_server(proxy.metaserver(), options), called))
        _say_start(options, sockets, called)
        tasks = [asyncio.create_task(server.serve(bound)) for server, bound in servers]
        await _until_told(ended, tasks)
        logs.say("stopping", running=proxy.admission.running)
        # Decoders may still call back for requests that run: the metaserver goes last.
        for (server, _), task in zip(servers, tasks, strict=True):
            server.should_exit = True
            await asyncio.gather(task, return_exceptions=True)
    finally:
        await proxy.close()
    logs.say("stopped")


async def _until_told(ended: asyncio.Event | None, tasks: Sequence[asyncio.Task[None]]) -> None:
    """A listener that ends by itself ends the proxy too."""
    told = ended or asyncio.Event()
    if ended is None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, told.set)
    waiting = asyncio.create_task(told.wait())
    try:
        await asyncio.wait({waiting, *tasks}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()


def _server(app: Starlette, options: ProxyOptions) -> _Server:
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        lifespan="off",
        ws="none",
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=max(1, round(options.deadlines.shutdown)),
    )
    return _Server(config)


def _say_start(options: ProxyOptions, sockets: list[socket.socket], called: list[socket.socket]) -> None:
    for line in flags.warnings(options):
        logs.say(line, logging.WARNING)
    where = {"listening": str(Address(options.host, listeners.port_of(sockets)))}
    if called:
        where["metaserver"] = str(Address(options.metaserver_host, listeners.port_of(called)))
    logs.say(
        "proxy ready",
        logging.INFO,
        mode=options.mode,
        signed=options.secret is not None,
        prefill=[str(one) for one in options.prefillers],
        decode=[str(one) for one in options.decoders],
        **where,
    )
