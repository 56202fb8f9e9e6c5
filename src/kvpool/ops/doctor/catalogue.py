"""Every question that doctor can ask, in the order in which it answers."""

from __future__ import annotations

from kvpool.ops.doctor.finding import Check
from kvpool.ops.doctor.rules import (
    configuration,
    container,
    environment,
    files,
    huge_pages,
    lease,
    measure,
    memory,
    npu_tools,
    ports,
    ssd,
    versions,
)

CATALOGUE: tuple[Check, ...] = (
    *configuration.CHECKS,
    *versions.CHECKS,
    *environment.CHECKS,
    *files.CHECKS,
    *container.CHECKS,
    *memory.CHECKS,
    *huge_pages.CHECKS,
    *ssd.CHECKS,
    *ports.CHECKS,
    *npu_tools.CHECKS,
    *lease.CHECKS,
    *measure.CHECKS,
)
