"""What a pool's disk tier is to be like; every process of the pool must say the same."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

Admission = Literal["all", "second_sight"]


@dataclass(frozen=True, slots=True)
class DiskSettings:
    """``folder`` is there, absolute and no link; the pool makes a folder of its own in it. Watermarks are percent.

    ``dram_high`` and ``dram_low``: once more than ``dram_high`` % of the memory is neither free nor both cold and copied, cold
    objects are copied to the disk until ``dram_low`` % is left (0: all are copied at once). ``high`` and ``low``: the same for the
    disk, where cold objects are dropped. ``admission``: copy everything, or only what was asked for again after it had been stored.
    """

    folder: str
    nbytes: int
    dram_high: int = 80
    dram_low: int = 70
    high: int = 95
    low: int = 90
    admission: Admission = "all"

    def __post_init__(self) -> None:
        if not Path(self.folder).is_absolute():
            raise ValueError(f"the folder of the disk tier is {self.folder!r}: it must be absolute")
        if self.nbytes < 1 << 20:
            raise ValueError(f"the disk tier has {self.nbytes} bytes: it needs at least 1 MiB")
        for low, high, least in ((self.dram_low, self.dram_high, 0), (self.low, self.high, 1)):
            if not least <= low <= high <= 100:
                raise ValueError(f"watermarks {low} and {high}: expected {least} <= low <= high <= 100")
        if self.admission not in ("all", "second_sight"):
            raise ValueError(f"admission is {self.admission!r} (accepted: all, second_sight)")

    def differences(self, other: DiskSettings) -> list[str]:
        """``name=mine here, name=theirs there`` for each setting that differs."""
        theirs = asdict(other)
        return [
            f"{name} is {theirs[name]!r} there and {mine!r} here" for name, mine in asdict(self).items() if theirs[name] != mine
        ]
