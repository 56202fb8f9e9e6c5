"""What tests of real stores need of the machine. What is missing is a skip that says what to install; in CI it is a failure."""

from __future__ import annotations

import importlib.util
import os
import shutil

import pytest

from tests.ascend_stand_in.refuse import refusal


def needs_memcache() -> None:
    """MemCache under the stand-in for the Ascend driver."""
    for package in ("memcache_hybrid", "memfabric_hybrid"):
        if importlib.util.find_spec(package) is None:
            _missing(f"MemCache: the package {package} is missing: pip install -r requirements/stores.txt")
    for tool, package in (("gcc", "gcc libc6-dev"), ("nsenter", "util-linux")):
        if shutil.which(tool) is None:
            _missing(f"MemCache: {tool} is missing: install {package} (make deps)")
    if os.geteuid() != 0:
        _missing("MemCache: the stand-in for the Ascend driver needs root, for a mount namespace")
    reason = refusal()
    if reason is not None:
        _missing(f"MemCache: {reason}")


def _missing(reason: str) -> None:
    if os.environ.get("CI"):
        pytest.fail(f"in CI nothing may be skipped: {reason}")
    pytest.skip(reason)
