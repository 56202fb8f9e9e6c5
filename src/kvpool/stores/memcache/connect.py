"""The one client of this process: the library has one per process, whatever number of stores are open."""

from __future__ import annotations

import os
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from types import ModuleType
from typing import NamedTuple, cast
from urllib.parse import urlsplit

from kvpool.options.memcache_conf import LocalConf
from kvpool.stores.memcache.closing import answers, at_exit, close_if_well
from kvpool.stores.memcache.library import Client, load
from kvpool.stores.memcache.signals import kept_handlers
from kvpool.stores.native import Call

CONFIG_VARIABLE = "MMC_LOCAL_CONFIG_PATH"
_PROBE_S = 0.5


class Wish(NamedTuple):
    """How a store wants to be connected. ``data``: it moves objects; else it only looks up, gives no memory and starts faster."""

    conf_path: str
    device_id: int
    data: bool


@dataclass
class _Shared:
    """``users`` is 0 for a client that could not be closed, or started too late: the next store takes it over."""

    client: Client
    wish: Wish
    users: int = 1


_lock = threading.Lock()
_shared: _Shared | None = None
_starting: Call[Client] | None = None
_given_up: Wish | None = None  # the start under way is waited for no more
_loaded_with: str | None = None


def acquire(options: LocalConf, wish: Wish, deadline_s: float) -> Client:
    """The client, started if need be. OSError in one line when the MetaService does not answer or the start takes too long; a start
    that ends later serves the next store."""
    global _shared
    end = time.monotonic() + deadline_s
    with _lock:
        _take_late()
        if _shared is not None:
            _check_same(_shared.wish, wish)
        if _shared is None or _shared.users == 0:
            module = _load(options, wish)
            for url in (options.meta_service_url, options.config_store_url):
                _probe(url, end)
        if _shared is None and _starting is not None:
            if not _starting.done():
                raise OSError("MemCache: an earlier start in this process has not ended yet; try again later")
            _take_late()  # it may have ended just now
        if _shared is None:
            _shared = _Shared(_start(module, wish, end, deadline_s), wish, users=0)
        if _shared.users == 0:
            _wait_until_it_answers(_shared.client, end, deadline_s)
        _shared.users += 1
        return _shared.client


def release(client: Client) -> None:
    """Close the client with its last user. Nobody calls it then."""
    global _shared
    with _lock:
        if _shared is None or _shared.client is not client:
            return
        _shared.users -= 1
        if _shared.users == 0 and close_if_well(client):
            _shared = None


def _take_late() -> None:
    """Keep a client that started after its store had given up. Closing it would hold the interpreter lock for seconds, or for ever
    where its MetaService does not answer just then."""
    global _shared, _given_up
    if _given_up is None or _starting is None or not _starting.done():
        return
    wish, _given_up = _given_up, None
    with suppress(Exception):
        _shared = _Shared(_starting.value(), wish, users=0)


def _open_client() -> Client | None:
    """At the end of the process, when nothing else opens or closes it any more."""
    _take_late()
    return None if _shared is None else _shared.client


def _check_same(there: Wish, wanted: Wish) -> None:
    if wanted.conf_path != there.conf_path:
        raise OSError(
            f"this process is connected to MemCache by {there.conf_path}: it cannot use {wanted.conf_path} at the same time"
        )
    if wanted.data and not there.data:
        raise OSError("this process has opened MemCache for lookups only: open the store that moves objects first")


def _load(options: LocalConf, wish: Wish) -> ModuleType:
    """The library takes its file from a variable, which it reads once: when it is loaded."""
    global _loaded_with
    if _loaded_with not in (None, wish.conf_path):
        raise OSError(f"this process has loaded MemCache with {_loaded_with}: it cannot use {wish.conf_path}")
    os.environ[CONFIG_VARIABLE] = wish.conf_path
    module = load(options.storage_enabled)
    if _loaded_with is None:
        at_exit(_open_client, lambda: _starting is not None and not _starting.done())
    _loaded_with = wish.conf_path
    return module


def _probe(url: str, end: float) -> None:
    """The library waits for minutes where nobody listens, so ask before it does."""
    parts = urlsplit(url)
    problem = ""
    while True:
        try:
            socket.create_connection((parts.hostname, cast(int, parts.port)), timeout=_PROBE_S).close()
            return
        except OSError as error:
            problem = error.strerror or str(error)
        if time.monotonic() + _PROBE_S > end:
            raise OSError(f"MemCache: nobody answers at {url} ({problem}): is the MetaService running, and is that its address?")
        time.sleep(0.1)


def _wait_until_it_answers(client: Client, end: float, deadline_s: float) -> None:
    """Its threads take a moment to start; one that lost its MetaService finds it again by itself, within seconds."""
    while not answers(client):
        if time.monotonic() > end:
            raise OSError(f"MemCache: the MetaService did not answer within {deadline_s:g} s")
        time.sleep(0.1)


def _start(module: ModuleType, wish: Wish, end: float, deadline_s: float) -> Client:
    """Init on a thread of its own: it cannot be interrupted."""
    global _starting, _given_up
    call: Call[Client] = Call(lambda: _init(module, wish), end)
    _starting = call
    threading.Thread(target=call.run, name="kvpool-memcache-init", daemon=True).start()
    if not call.wait(end - time.monotonic()):
        _given_up = wish
        hint = "was the MetaService restarted? then start this process again, or the whole pool"
        raise OSError(f"MemCache: the library did not start within {deadline_s:g} s ({hint})")
    return call.value()


def _init(module: ModuleType, wish: Wish) -> Client:
    with kept_handlers():
        client: Client = module.DistributedObjectStore()
    code = client.init(wish.device_id, init_bm=wish.data)
    if code != 0:
        raise OSError(f"MemCache: the library does not start with {wish.conf_path}: code {code} (it says why on stderr)")
    return client
