"""What rules need to know of this host. Tests put their own probe into a Deployment; None stands for unknown."""

from __future__ import annotations

import importlib.util
import os
from contextlib import suppress
from pathlib import Path
from typing import Literal

from kvpool.options.block_device import Disk, look

Device = Literal["cpu", "cuda", "npu"]


class Probe:
    """Looks at the host it runs on. Reads only; every look takes milliseconds."""

    def __init__(self, root: str = "/") -> None:
        self.root = Path(root)

    def memory_available(self) -> int | None:
        """Bytes that new processes can get."""
        kib = self._meminfo("MemAvailable")
        return None if kib is None else kib << 10

    def huge_pages(self) -> int | None:
        """Reserved huge pages of 2 MiB, used or not; 0 where the host's huge pages have another size."""
        return self._meminfo("HugePages_Total") if self._meminfo("Hugepagesize") == 2048 else 0

    def rdma_devices(self) -> int:
        """RDMA devices that the kernel shows."""
        with suppress(OSError):
            return len(os.listdir(self.root / "sys" / "class" / "infiniband"))
        return 0

    def accelerator(self) -> Device | None:
        """The kind of accelerator whose device files are there; None says nothing, a container may not show them."""
        for prefix, device in (("davinci", "npu"), ("nvidia", "cuda")):
            if self.devices(prefix):
                return device  # type: ignore[return-value]
        return None

    def devices(self, prefix: str) -> list[int]:
        """The numbers of the device files ``/dev/<prefix><number>``."""
        with suppress(OSError):
            names = os.listdir(self.root / "dev")
            return [int(name[len(prefix) :]) for name in names if name.startswith(prefix) and name[len(prefix) :].isdigit()]
        return []

    def disk(self, path: str) -> Disk:
        """What is at a path that should be an empty block device."""
        return look(path, str(self.root))

    def package_folder(self, name: str) -> str | None:
        """The folder of an installed package, without importing it."""
        with suppress(ImportError, ValueError):
            spec = importlib.util.find_spec(name)
            if spec is not None and spec.submodule_search_locations:
                return str(next(iter(spec.submodule_search_locations)))
        return None

    def is_folder(self, path: str) -> bool:
        return os.path.isdir(path)

    def can_make(self, path: str) -> bool:
        """True where the folder is there and writable, or could be made."""
        place = Path(path)
        while not place.exists() and place != place.parent:
            place = place.parent
        return place.is_dir() and os.access(place, os.W_OK | os.X_OK)

    def _meminfo(self, name: str) -> int | None:
        with suppress(OSError, ValueError, IndexError):
            for line in (self.root / "proc" / "meminfo").read_text().splitlines():
                if line.startswith(f"{name}:"):
                    return int(line.split()[1])
        return None


HOST = Probe()
"""The host this process runs on."""
