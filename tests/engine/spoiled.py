"""Corrupt a pool of the embedded store from outside, while engines use it, and mend it again."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from kvpool.stores import build_store
from kvpool.stores.base import MappedStore


@contextmanager
def spoiled(root: Path, name: str) -> Iterator[None]:
    """Within, the lowest bit of every byte of every object is flipped: floats stay finite, some 4 times as large or small."""
    store = build_store("local", root=root, name=name)
    assert isinstance(store, MappedStore)
    store.open()
    try:
        keys = store.list()
        assert _flip(store, keys) > 0, "nothing to spoil"
        try:
            yield
        finally:
            _flip(store, keys)
    finally:
        store.close()


def _flip(store: MappedStore, keys: list[bytes]) -> int:
    """How many objects were there."""
    pins = store.pin(keys)
    try:
        found = [(address, nbytes) for address, nbytes in zip(pins.addresses, pins.nbytes, strict=True) if address]
        for address, nbytes in found:
            np.ctypeslib.as_array((ctypes.c_ubyte * nbytes).from_address(address))[:] ^= 1
    finally:
        store.unpin(pins)
    return len(found)
