"""How the client is closed, and how a process ends that has one.

The library closes in one to four seconds, and holds Python's interpreter lock meanwhile; without its MetaService it does so for
minutes. A process that ends without having closed it crashes at its very end, or hangs there. So: closed only while the MetaService
answers, else left open; and the end of such a process has a deadline."""

from __future__ import annotations

import atexit
import logging
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from kvpool.stores.memcache.library import Client
from kvpool.stores.native import Call

logger = logging.getLogger(__name__)

PROBE_KEY = "v1:kvpool-health"
ANSWER_S = 1.0
EXIT_S = 5.0


def answers(client: Client) -> bool:
    """Whether the MetaService answers the client now."""
    call = Call(lambda: client.batch_is_exist([PROBE_KEY])[0], time.monotonic() + ANSWER_S)
    threading.Thread(target=call.run, name="kvpool-memcache-probe", daemon=True).start()
    with suppress(Exception):
        return call.wait(ANSWER_S) and call.value() in (0, 1)
    return False


def close_if_well(client: Client) -> bool:
    """True: it is closed. No other call runs, and none will come."""
    if not answers(client):
        return False
    client.close()
    return True


def at_exit(open_client: Callable[[], Client | None], starting: Callable[[], bool]) -> None:
    """Close at the end of the process what is open then; where that cannot be done, or a start hangs, see to it that the process
    ends."""

    def end() -> None:
        client = open_client()
        if client is None and not starting():
            return
        if client is not None and close_if_well(client):
            return
        logger.warning("kvpool: MemCache cannot be closed without its MetaService; this process ends within %g s", EXIT_S)
        with suppress(ValueError):  # not the main thread
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, EXIT_S)

    atexit.register(end)
