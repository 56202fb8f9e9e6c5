"""What a test needs of the machine: a skip that names what to install. In CI nothing may be skipped: there it is a failure."""

from __future__ import annotations

import importlib
import os

import pytest


def lacking(text: str) -> None:
    """Skip, or fail where CI is set."""
    if os.environ.get("CI"):
        pytest.fail(f"in CI this must be there: {text}")
    pytest.skip(text)


def needs_mooncake() -> None:
    try:
        importlib.import_module("mooncake.store")
    except ImportError as error:
        lacking(f"Mooncake cannot be imported ({error}): pip install -r requirements/stores.txt, then make deps")
