"""What the store really did: bytes right, speed."""

from __future__ import annotations

from kvpool.ops.doctor.finding import Check, Finding
from kvpool.ops.doctor.measuring import Measured
from kvpool.ops.doctor.need import Need

AREA = "measure"
SPEED = Check(AREA, "speed", "put and get of 64 MB through the store, and every byte is right", "--measure; local by default")
CHECKS = (SPEED,)

LOWEST_GBPS = {"local": 1.0, "mooncake": 0.2, "memcache": 0.2, "yuanrong": 0.2}
"""GB/s of a get below which something is wrong with the path rather than slow: measured ones are five times that and more."""

MAKE_ROOM = (
    "make room in shared memory (for a container --shm-size), or set local_pool_root to a folder that this user may write to"
)


def judge_measure(measured: Measured | None, need: Need) -> list[Finding]:
    lowest = LOWEST_GBPS[need.backend]
    needed = f"get above {lowest:g} GB/s"
    if measured is None:
        if need.backend == "local":
            return []
        return [SPEED.unknown("not measured", needed, "give --measure: it writes 64 MB to the store and removes them again")]
    if measured.error:
        services = "start the store's services and correct its configuration, then measure again"
        return [SPEED.failure(measured.error, needed, MAKE_ROOM if need.backend == "local" else services)]
    shown = f"put {measured.put_gbps:.2f} GB/s, get {measured.get_gbps:.2f} GB/s"
    if not measured.same:
        return [
            SPEED.failure(
                f"{shown}: the bytes read are not the bytes written", "the same bytes", "do not use this store; report it"
            )
        ]
    if measured.get_gbps < lowest:
        fix = "look at what else runs on CPUs and links; for mooncake and memcache at the protocol, for rdma at its device"
        return [SPEED.warning(shown, needed, fix)]
    return [SPEED.ok(shown, needed)]
