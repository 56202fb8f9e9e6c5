"""What a test needs of the machine: a skip that names what to install, and a failure where the environment says CI."""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
from typing import NoReturn

import pytest


def lacking(reason: str) -> NoReturn:
    if os.environ.get("CI"):
        pytest.fail(f"in CI nothing is skipped: {reason}")
    pytest.skip(reason)


def needs_mooncake() -> None:
    try:
        importlib.import_module("mooncake.store")
    except ImportError as error:
        lacking(f"Mooncake cannot be imported ({error}): pip install -r requirements/stores.txt, then make deps")


def needs_yuanrong() -> None:
    """The client library and the worker of the datasystem."""
    from kvpool.stores.yuanrong import library

    if not library.installed():
        lacking(f"pip install {library.DISTRIBUTION}")


def needs_etcd() -> None:
    if shutil.which("etcd") is None:
        lacking("etcd is missing: make deps")
