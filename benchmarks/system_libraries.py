"""System libraries that a peer's wheel needs and this host lacks: unpacked beside the peer, not installed."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

DOWNLOAD_S = 120


def library_path(folder: Path, library: str, packages: Sequence[str]) -> str:
    """An LD_LIBRARY_PATH under which `library` is found; empty where the host has it. `packages` are Debian's, fetched with apt
    into `folder` once. RuntimeError, naming what to install, where that does not work."""
    try:
        ctypes.CDLL(library)
        return ""
    except OSError:
        pass
    if not folder.exists():
        fetch(folder, library, packages)
    found = {str(path.parent) for path in folder.rglob("lib*.so.*")}
    return ":".join(sorted(found))


def fetch(folder: Path, library: str, packages: Sequence[str]) -> None:
    """Download and unpack; whole or not at all. Needs no privileges, but apt's lists."""
    why = f"{library} is missing on this host: install {packages[0]}, or run apt-get update for a private copy"
    if not (shutil.which("apt-get") and shutil.which("dpkg-deb")):
        raise RuntimeError(why)
    scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        command = ["apt-get", "download", *packages]
        done = subprocess.run(command, cwd=scratch, capture_output=True, text=True, check=False, timeout=DOWNLOAD_S)
        archives = list(scratch.glob("*.deb"))
        if done.returncode != 0 or len(archives) != len(packages):
            raise RuntimeError(f"{why} ({' '.join(done.stderr.splitlines()[-1:])})")
        for archive in archives:
            subprocess.run(["dpkg-deb", "-x", archive, scratch / "unpacked"], check=True, capture_output=True, timeout=DOWNLOAD_S)
        (scratch / "unpacked").rename(folder)
    except (subprocess.TimeoutExpired, subprocess.CalledProcessError) as error:
        raise RuntimeError(f"{why} ({error})") from None
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
