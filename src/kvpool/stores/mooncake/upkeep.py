"""What a client does in the background while it is open: measure the lease, map the pool's memory, leave signs of life."""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections.abc import Callable

from kvpool.options.mooncake_json import MooncakeOptions
from kvpool.stores.context import StoreContext
from kvpool.stores.mooncake import lease_ttl, segment, ssd
from kvpool.stores.mooncake.client import Client
from kvpool.stores.mooncake.connect import segment_bytes
from kvpool.stores.mooncake.library import Library
from kvpool.stores.native import Closed, NativeCalls

logger = logging.getLogger(__name__)

_CALL_S = 5.0
_TRIES = 6
_BETWEEN_S = 5.0


class Upkeep:
    """Its calls go through ``calls``, so that none is made after the store has closed."""

    def __init__(
        self,
        client: Client,
        calls: NativeCalls,
        library: Library | None,
        options: MooncakeOptions,
        context: StoreContext,
        load_deadline_s: float | None,
    ) -> None:
        self._client = client
        self._calls = calls
        self._library = library
        self._options = options
        self._context = context
        self._load_deadline_s = load_deadline_s
        self._stop = threading.Event()
        self.lease_s = lease_ttl.ASSUMED_S
        self.lease_known = threading.Event()
        self.mapped_bytes = 0
        self.mapped = threading.Event()
        tasks: list[tuple[str, Callable[[], None]]] = []
        if context.role in ("worker", "scheduler"):
            tasks.append(("lease", self._measure))
        if segment_bytes(options, context) and options.protocol == "tcp":
            tasks.append(("prefault", self._map))
        else:
            self.mapped.set()  # none of its own, or the library has pinned it
        if segment_bytes(options, context) and options.enable_ssd_offload:
            tasks.append(("alive", self._live))
        self._threads = [
            threading.Thread(target=self._guarded, args=(name, task), name=f"kvpool-mooncake-{name}", daemon=True)
            for name, task in tasks
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self, timeout_s: float) -> None:
        self._stop.set()
        end = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))

    def _guarded(self, name: str, task: Callable[[], None]) -> None:
        try:
            task()
        except Closed:
            return
        except Exception:
            logger.warning("kvpool: Mooncake's %s task has ended", name, exc_info=True)

    def _ask(self, work: Callable[[Client], int]) -> int:
        return self._calls.ask(lambda: work(self._client), _CALL_S)

    def _measure(self) -> None:
        """Again for a while: the first engine may come before there is any memory in the pool."""
        name = f"kvpool-lease:{secrets.token_hex(8)}"
        for _ in range(_TRIES):
            try:
                seconds = lease_ttl.measure(self._ask, name, self._config(), self._stop.wait)
            except TimeoutError:
                seconds = None
            if seconds is not None:
                self.lease_s = seconds
                self.lease_known.set()
                ascend = self._options.protocol == "ascend"
                complaint = lease_ttl.complaint(seconds, self._load_deadline_s, os.environ, ascend=ascend)
                if complaint:
                    logger.warning("kvpool: %s", complaint)
                return
            if self._stop.wait(_BETWEEN_S):
                return
        logger.warning("kvpool: the lease of the Mooncake master could not be measured; %g s are assumed", self.lease_s)

    def _map(self) -> None:
        try:
            self._map_segment()
        finally:
            self.mapped.set()

    def _map_segment(self) -> None:
        name, value = f"kvpool-place:{secrets.token_hex(8)}", secrets.token_bytes(32)
        config = self._config(self._client_name())
        address = 0
        if self._ask(lambda client: client.put(name, value, config)) == 0:
            address = self._ask(lambda client: segment.address_in(client, name, value))
            self._ask(lambda client: client.remove(name, True))
        if address:
            memory = segment.mapping_around(address, segment_bytes(self._options, self._context))
            self.mapped_bytes = segment.populate(memory, self._stop.wait)
        else:
            logger.info("kvpool: the pool's memory is not mapped ahead: where it lies is not known")

    def _live(self) -> None:
        folder = ssd.folder_of(self._options, self._context)
        while True:
            ssd.sign_of_life(folder)
            if self._stop.wait(ssd.ALIVE_S):
                return

    def _client_name(self) -> str:
        return self._calls.ask(self._client.get_hostname, _CALL_S)

    def _config(self, own: str = "") -> object:
        if self._library is None:
            raise Closed("the store is closed")
        return self._library.put_config(segment=own)
