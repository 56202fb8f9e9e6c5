"""Compile the stand-in, once per change of its sources, into a cache folder."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

SOURCES = Path(__file__).parent / "driver"
NAMES = ("libascendcl.so", "libascend_hal.so", "libra.so", "libtsdclient.so", "libhccl.so")
DRIVER_VERSION = "Innerversion=V100R001C23SPC005B219\n"


def build(cache: Path | None = None) -> Path:
    """The folder that stands for ASCEND_HOME_PATH: libraries in ``lib64``, a version file in ``driver``. OSError without gcc."""
    home = (cache or _cache()) / f"ascend-stand-in-{_fingerprint()}"
    if home.is_dir():
        return home
    gcc = shutil.which("gcc")
    if gcc is None:
        raise OSError("there is no gcc to build the stand-in for the Ascend driver with: install gcc and libc6-dev")
    home.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(dir=home.parent))
    (aside / "lib64").mkdir()
    (aside / "driver").mkdir()
    (aside / "driver" / "version.info").write_text(DRIVER_VERSION)
    made = aside / "lib64" / NAMES[0]
    command = [gcc, "-O2", "-Wall", "-shared", "-fPIC", "-pthread", "-o", str(made), *map(str, sorted(SOURCES.glob("*.c")))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode != 0:
        shutil.rmtree(aside)
        raise OSError(f"gcc could not build the stand-in for the Ascend driver: {done.stderr.strip()[-500:]}")
    for name in NAMES[1:]:
        (aside / "lib64" / name).symlink_to(NAMES[0])
    try:
        aside.rename(home)
    except OSError:  # somebody else was faster
        shutil.rmtree(aside)
    return home


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path(tempfile.gettempdir()) / f"kvpool-tests-{os.getuid()}")


def _fingerprint() -> str:
    content = hashlib.sha256(DRIVER_VERSION.encode())
    for source in sorted(SOURCES.iterdir()):
        content.update(source.name.encode() + source.read_bytes())
    return content.hexdigest()[:12]
