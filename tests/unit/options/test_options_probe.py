"""What is seen of a host: read from files of the kernel, here from a folder that stands for its root."""

from __future__ import annotations

import os

import pytest

from kvpool.options.block_device import HEAD, Disk, in_use, look, signature_of
from kvpool.options.probe import Probe


def put(root, path, text=""):
    place = root / path
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(text)


def test_memory_and_huge_pages(tmp_path):
    put(
        tmp_path,
        "proc/meminfo",
        "MemTotal: 8 kB\nMemAvailable:    2048 kB\nHugePages_Total:      20\nHugepagesize:       2048 kB\n",
    )
    host = Probe(str(tmp_path))
    assert host.memory_available() == 2 << 20
    assert host.huge_pages() == 20
    put(tmp_path, "proc/meminfo", "HugePages_Total: 20\nHugepagesize: 1048576 kB\n")
    assert host.huge_pages() == 0
    assert host.memory_available() is None


def test_devices(tmp_path):
    host = Probe(str(tmp_path))
    assert host.rdma_devices() == 0
    assert host.accelerator() is None
    (tmp_path / "sys/class/infiniband/mlx5_0").mkdir(parents=True)
    assert host.rdma_devices() == 1
    put(tmp_path, "dev/nvidiactl")
    assert host.accelerator() is None
    put(tmp_path, "dev/nvidia0")
    assert host.accelerator() == "cuda"
    put(tmp_path, "dev/davinci_manager")
    assert host.accelerator() == "cuda"
    put(tmp_path, "dev/davinci0")
    assert host.accelerator() == "npu"


def test_folders_and_packages(tmp_path, monkeypatch):
    host = Probe()
    assert host.is_folder(str(tmp_path))
    assert host.can_make(str(tmp_path / "a" / "b"))
    put(tmp_path, "file")
    assert not host.can_make(str(tmp_path / "file" / "b"))
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert not host.can_make(str(tmp_path / "a"))
    assert host.package_folder("kvpool") is not None
    assert host.package_folder("no_such_package") is None


@pytest.mark.parametrize(
    ("offset", "magic", "name"),
    [
        (0, b"XFSB", "xfs"),
        (0x438, b"\x53\xef", "ext"),
        (0x10040, b"_BHRfS_M", "btrfs"),
        (4086, b"SWAPSPACE2", "swap"),
        (0, b"LUKS\xba\xbe", "LUKS"),
        (512, b"EFI PART", "a partition table"),
        (510, b"\x55\xaa", "a boot sector or partition table"),
        (0, b"", ""),
    ],
)
def test_signatures(offset, magic, name):
    head = bytearray(HEAD)
    head[offset : offset + len(magic)] = magic
    assert signature_of(bytes(head)) == name
    assert signature_of(b"") == ""


def test_what_is_no_block_device(tmp_path):
    assert look(str(tmp_path / "missing")) == Disk("missing")
    assert look(str(tmp_path)) == Disk("other")
    put(tmp_path, "image")
    assert look(str(tmp_path / "image")) == Disk("other")
    assert look("/dev/null") == Disk("other")


def test_what_uses_a_block_device(tmp_path):
    def disk():
        return in_use("/dev/nvme0n1", 259, 0, tmp_path, "")

    assert disk() == Disk("block device")
    put(
        tmp_path,
        "proc/self/mountinfo",
        "22 1 8:1 / / rw - ext4 /dev/sda1 rw\n36 22 259:0 / /data rw,noatime shared:1 - xfs /dev/other rw\n",
    )
    assert disk().mounted_at == "/data"
    put(tmp_path, "proc/self/mountinfo", "36 22 0:31 / /pool rw - btrfs /dev/nvme0n1 rw\n")
    assert disk().mounted_at == "/pool"
    put(tmp_path, "proc/self/mountinfo", "36 22 259:1 / /data rw - xfs /dev/nvme0n1p1 rw\n")
    put(tmp_path, "sys/dev/block/259:0/nvme0n1p1/partition", "1\n")
    (tmp_path / "sys/dev/block/259:0/holders/md0").mkdir(parents=True)
    put(tmp_path, "proc/swaps", "Filename Type Size Used Priority\n/dev/nvme0n1 partition 1 0 -2\n")
    put(tmp_path, "sys/dev/block/259:0/size", "8\n")
    assert disk() == Disk("block device", partitions=1, held_by="md0, swap", nbytes=4096)
