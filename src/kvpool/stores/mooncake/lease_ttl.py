"""How long a lease of the master lasts: it is in no API, so it is measured with a tiny object of our own.

A lookup grants the lease; until it ends the master refuses to remove the object. What is told is never longer than the truth.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from kvpool.options.lease import default_transfer_ms
from kvpool.stores.mooncake import codes
from kvpool.stores.mooncake.client import Client

ASSUMED_S = 2.0  # until it is known
LONGEST_S = 120.0
_TIMEOUTS = ("ASCEND_CONNECT_TIMEOUT", "ASCEND_TRANSFER_TIMEOUT")  # milliseconds

Ask = Callable[[Callable[[Client], int]], int]


def measure(ask: Ask, name: str, config: object, wait: Callable[[float], bool]) -> float | None:
    """Seconds; None where it cannot be told. ``ask`` makes one call; ``wait`` sleeps and is True when it is time to stop."""
    if ask(lambda client: client.put(name, b"kvpool", config)) != 0:
        return None
    if ask(lambda client: client.batch_is_exist([name])[0]) != 1:
        return None
    granted = time.monotonic()
    held = 0.0
    while (passed := time.monotonic() - granted) < LONGEST_S:
        if wait(max(0.02, passed / 20)):
            break
        asked = time.monotonic()
        code = ask(lambda client: client.remove(name))
        if code == 0:
            return held
        if code != codes.LEASED:
            return None
        held = asked - granted
    ask(lambda client: client.remove(name, True))
    return held if held >= LONGEST_S * 0.9 else None


def complaint(seconds: float, load_deadline_s: float | None, env: Mapping[str, str], *, ascend: bool = False) -> str:
    """One line naming what is longer than a lease; empty where nothing is. ``ascend``: transfers go over that protocol."""
    longer = [f"{name}={env[name]} ms" for name in _TIMEOUTS if env.get(name, "").isdigit() and int(env[name]) / 1000 >= seconds]
    transfer = default_transfer_ms(env) if ascend else None
    if transfer is not None and transfer / 1000 >= seconds:
        longer.append(f"a transfer may take ({transfer} ms while ASCEND_TRANSFER_TIMEOUT is not set)")
    if load_deadline_s is not None and load_deadline_s > seconds:
        longer.append(f"the load deadline of {load_deadline_s:g} s")
    if not longer:
        return ""
    return (
        f"a lease of the Mooncake master lasts {seconds:.1f} s, which is not longer than {' and '.join(longer)}: an object may be "
        "evicted while it is read, and that load fails; raise --default_kv_lease_ttl of mooncake_master"
    )
