"""Environments of peers: folders of packages beside the project's environment, which stays as it is."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.settings import cache_folder

INSTALL_S = 600


def overlay(name: str, requirements: Sequence[str]) -> Path:
    """A folder with exactly these packages, made once; their own requirements are not followed, since their pins contradict those
    of vLLM. RuntimeError with pip's last lines when it cannot be made."""
    version = hashlib.sha256("\n".join([sys.version, *requirements]).encode()).hexdigest()[:8]
    target = cache_folder() / "peers" / f"{name}-{version}"
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=target.parent))
    print(f"bench: installing {' '.join(requirements)} for {name}", flush=True)
    try:
        command = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-input", "--target", str(scratch), *requirements]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=INSTALL_S)
        if done.returncode != 0:
            raise RuntimeError(f"pip could not install {name}: {' '.join(done.stderr.splitlines()[-3:])}")
        os.chmod(scratch, 0o755)
        scratch.rename(target)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"pip took more than {INSTALL_S} s for {name}") from None
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target
