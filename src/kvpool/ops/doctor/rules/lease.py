"""How long stores protect what is read, against how long a transfer may take: configured and measured."""

from __future__ import annotations

from collections.abc import Mapping

from kvpool.ops.doctor.finding import Check, Finding
from kvpool.ops.doctor.measuring import Measured
from kvpool.ops.doctor.need import Need
from kvpool.options.errors import OptionError
from kvpool.options.lease import check_lease, default_transfer_ms, timeouts_ms
from kvpool.options.mooncake_json import MooncakeOptions

AREA = "lease"
CONFIGURED = Check(
    AREA, "configured", "the lease of a service's command or file outlasts transfers", "it is given by --service or --config"
)
MEASURED = Check(AREA, "measured", "the lease that the service really grants outlasts transfers", "mooncake with --measure")
TIMEOUTS = Check(
    AREA,
    "timeouts",
    "ASCEND_CONNECT_TIMEOUT and ASCEND_TRANSFER_TIMEOUT are milliseconds, HCCL_RDMA_TIMEOUT and HCCL_RDMA_RETRY_CNT numbers",
    "they are set; the latter with ascend",
)
CHECKS = (CONFIGURED, MEASURED, TIMEOUTS)


def judge_lease(measured: Measured | None, need: Need) -> list[Finding]:
    try:
        limits: Mapping[str, int] = timeouts_ms(need.env)
        _default_ms(need)
    except OptionError as error:
        unit = "milliseconds" if error.key.startswith("ASCEND_") else "number"
        return [TIMEOUTS.failure(str(error), unit, f"export {error.key}=<{unit}>")]
    found = [TIMEOUTS.ok(", ".join(f"{name}={value} ms" for name, value in limits.items()))] if limits else []
    found += [_lease(CONFIGURED, name, ttl, need) for name, ttl in need.leases]
    if need.backend == "mooncake" and measured is not None and not measured.error:
        if measured.lease_s is None:
            fix = "give the master's command with --service, which is compared instead"
            found.append(MEASURED.unknown("not known in time", "longer than a transfer", fix))
        else:
            found.append(_lease(MEASURED, "default_kv_lease_ttl (measured)", int(measured.lease_s * 1000), need))
    return found


def _lease(check: Check, name: str, ttl_ms: int, need: Need) -> Finding:
    """Shorter than a timeout that is set: reads will fail. Shorter than our own deadline, or than a default: slow ones may."""
    load = need.options.load_timeout_ms if need.options is not None else None
    longest = max([*timeouts_ms(need.env).values(), load or 0, _default_ms(need) or 0])
    needed = f"longer than {longest} ms" if longest else "longer than a transfer"
    fix = f"raise {name.partition(' ')[0]} above {longest} ms (for mooncake_master --default_kv_lease_ttl), or lower the timeout"
    try:
        warnings = check_lease(ttl_ms, need.env, load, name, "", ascend=_over_ascend(need))
    except OptionError as error:
        return check.failure(f"{name} is {ttl_ms} ms: {error.reason}", needed, fix)
    if warnings:
        return check.warning(warnings[0], needed, fix)
    return check.ok(f"{name} is {ttl_ms} ms", needed)


def _over_ascend(need: Need) -> bool:
    return isinstance(need.conf, MooncakeOptions) and need.conf.protocol == "ascend"


def _default_ms(need: Need) -> int | None:
    """The longest transfer where nobody set one; None where it does not matter."""
    return default_transfer_ms(need.env) if _over_ascend(need) else None
