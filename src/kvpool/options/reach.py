"""Which devices' memory each store reaches: one judgement for `kvpool config check`, `kvpool up` and the start of an engine."""

from __future__ import annotations

from kvpool.options.ascend_store import BackendName
from kvpool.options.errors import OptionError
from kvpool.options.probe import Device

REACHED: dict[BackendName, tuple[Device, ...]] = {
    "local": ("cpu",),
    "mooncake": ("cpu", "cuda", "npu"),
    "memcache": ("cpu", "npu"),
    "yuanrong": ("cpu", "npu"),
}


def unreached(backend: BackendName, device: Device) -> str:
    """Why this store is none for KV on ``device``; "" where it is one."""
    return "" if device in REACHED[backend] else f"does not reach the memory of {device}"


def check_reach(backend: BackendName, device: Device | None, key: str = "backend", where: str = "") -> None:
    """OptionError, naming the stores that do, where ``backend`` does not reach ``device``. None: not known, so not judged."""
    if device is not None and (reason := unreached(backend, device)):
        fitting = ", ".join(name for name, devices in REACHED.items() if device in devices)
        raise OptionError(key, backend, f"{reason}; accepted: {fitting}", where=where)
