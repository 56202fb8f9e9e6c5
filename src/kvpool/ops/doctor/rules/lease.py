"""How long stores protect what is read, against how long a transfer may take: configured and measured."""

from __future__ import annotations

from collections.abc import Mapping

from kvpool.ops.doctor.finding import Check, Finding
from kvpool.ops.doctor.measuring import Measured
from kvpool.ops.doctor.need import Need
from kvpool.options.errors import OptionError
from kvpool.options.lease import check_lease, timeouts_ms

AREA = "lease"
CONFIGURED = Check(
    AREA, "configured", "the lease of a service's command or file outlasts transfers", "it is given by --service or --config"
)
MEASURED = Check(AREA, "measured", "the lease that the service really grants outlasts transfers", "mooncake with --measure")
TIMEOUTS = Check(AREA, "timeouts", "ASCEND_CONNECT_TIMEOUT and ASCEND_TRANSFER_TIMEOUT are milliseconds", "they are set")
CHECKS = (CONFIGURED, MEASURED, TIMEOUTS)


def judge_lease(measured: Measured | None, need: Need) -> list[Finding]:
    try:
        limits: Mapping[str, int] = timeouts_ms(need.env)
    except OptionError as error:
        return [TIMEOUTS.failure(str(error), "milliseconds", f"export {error.key}=<milliseconds>")]
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
    """Shorter than a timeout that is set: reads will fail. Shorter than our own deadline: slow ones may."""
    load = need.options.load_timeout_ms if need.options is not None else None
    longest = max([*timeouts_ms(need.env).values(), load or 0])
    needed = f"longer than {longest} ms" if longest else "longer than a transfer"
    fix = f"raise {name.partition(' ')[0]} above {longest} ms (for mooncake_master --default_kv_lease_ttl), or lower the timeout"
    try:
        warnings = check_lease(ttl_ms, need.env, load, name, "")
    except OptionError as error:
        return check.failure(f"{name} is {ttl_ms} ms: {error.reason}", needed, fix)
    if warnings:
        return check.warning(warnings[0], needed, fix)
    return check.ok(f"{name} is {ttl_ms} ms", needed)
