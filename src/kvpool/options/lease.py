"""How long a store protects what is being read, against how long a transfer may take."""

from __future__ import annotations

from collections.abc import Mapping

from kvpool.options.errors import OptionError
from kvpool.options.prefill_decode import TRANSFER_TIMEOUT, transfer_timeout_ms
from kvpool.options.scalars import integer

CONNECT_TIMEOUT = "ASCEND_CONNECT_TIMEOUT"
_MILLISECONDS = integer(1, 3_600_000)


def timeouts_ms(env: Mapping[str, str]) -> dict[str, int]:
    """The timeouts of transfers that are set; OptionError where one is no number of milliseconds."""
    found = {}
    for variable in (CONNECT_TIMEOUT, TRANSFER_TIMEOUT):
        if env.get(variable):
            try:
                found[variable] = _MILLISECONDS.read(env[variable])
            except ValueError:
                raise OptionError(variable, env[variable], f"expected {_MILLISECONDS.accepted} (milliseconds)") from None
    return found


def default_transfer_ms(env: Mapping[str, str]) -> int | None:
    """The longest transfer over ascend where nobody set one; None where ASCEND_TRANSFER_TIMEOUT is set. OptionError as above."""
    return None if env.get(TRANSFER_TIMEOUT) else transfer_timeout_ms(env)


def lease_warnings(
    ttl_ms: int, env: Mapping[str, str], load_timeout_ms: int | None, name: str, *, ascend: bool = False
) -> list[str]:
    """For a lease of ``ttl_ms`` that was measured or read as ``name``: one line for each time that it does not outlast. ``ascend``:
    transfers go over that protocol."""
    limits = dict(timeouts_ms(env))
    if load_timeout_ms is not None:
        limits["load_timeout_ms"] = load_timeout_ms
    lines = [
        f"{name}={ttl_ms} ms is not longer than {limit}={value} ms: what is read that long loses its lease and fails; "
        f"raise the one above {value} or lower the other"
        for limit, value in limits.items()
        if ttl_ms <= value
    ]
    longest = default_transfer_ms(env) if ascend else None
    if longest is not None and ttl_ms <= longest:
        lines.append(
            f"{name}={ttl_ms} ms is not longer than a transfer may take: {longest} ms while {TRANSFER_TIMEOUT} is not set; "
            f"raise the lease above {longest}, or set {TRANSFER_TIMEOUT} below the lease"
        )
    return lines


def check_lease(
    ttl_ms: int, env: Mapping[str, str], load_timeout_ms: int | None, name: str, where: str, *, ascend: bool = False
) -> list[str]:
    """The same for a configured lease: OptionError where a timeout that was set exceeds it, a warning for what nobody set."""
    for variable, value in timeouts_ms(env).items():
        if ttl_ms <= value:
            raise OptionError(name, ttl_ms, f"must be larger than {variable}={value} (milliseconds)", where=where)
    return lease_warnings(ttl_ms, env, load_timeout_ms, name, ascend=ascend)
