"""What a test needs of the machine: a skip that names what to install, and a failure where the environment says CI."""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
from typing import NoReturn

import pytest

from tests.ascend_stand_in.refuse import refusal


def lacking(reason: str) -> NoReturn:
    if os.environ.get("CI"):
        pytest.fail(f"in CI nothing is skipped: {reason}")
    pytest.skip(reason)


def needs_mooncake() -> None:
    try:
        importlib.import_module("mooncake.store")
    except ImportError as error:
        lacking(f"Mooncake cannot be imported ({error}): pip install -r requirements/stores.txt, then make deps")


def needs_memcache() -> None:
    """MemCache under the stand-in for the Ascend driver."""
    for package in ("memcache_hybrid", "memfabric_hybrid"):
        if importlib.util.find_spec(package) is None:
            lacking(f"MemCache: the package {package} is missing: pip install -r requirements/stores.txt")
    for tool, package in (("gcc", "gcc libc6-dev"), ("nsenter", "util-linux")):
        if shutil.which(tool) is None:
            lacking(f"MemCache: {tool} is missing: install {package} (make deps)")
    if os.geteuid() != 0:
        lacking("MemCache: the stand-in for the Ascend driver needs root, for a mount namespace")
    reason = refusal()
    if reason is not None:
        lacking(f"MemCache: {reason}")


def needs_yuanrong() -> None:
    """The client library and the worker of the datasystem."""
    from kvpool.stores.yuanrong import library

    if not library.installed():
        lacking(f"pip install {library.DISTRIBUTION}")


def needs_etcd() -> None:
    if shutil.which("etcd") is None:
        lacking("etcd is missing: make deps")
