"""Notes in a store that cannot list: small objects under well-known keys, a few places per prefix.

A note lies in place ``i`` of its family (the name without what follows its last ``:``). A writer takes the first free place; when all
are taken the note is not kept: notes explain, nothing depends on them.
"""

from __future__ import annotations

import json

import numpy as np

from kvpool.stores.base import Batch, Status, Store

PLACES = 16
NOTE_BYTES = 16 << 10
DEADLINE_S = 5.0


def _keys(family: bytes) -> list[bytes]:
    return [family + f":place-{i}".encode() for i in range(PLACES)]


def _family(name: bytes) -> bytes:
    return name.rstrip(b":") if name.endswith(b":") else name.rpartition(b":")[0]


def read(store: Store, prefix: bytes) -> dict[bytes, str]:
    """The notes of the family of ``prefix`` whose names start with it; empty where the store gives no answer."""
    memory = np.zeros((PLACES, NOTE_BYTES), dtype=np.uint8)
    handle = store.get(_batch(_keys(_family(prefix)), memory), DEADLINE_S)
    if not handle.wait(DEADLINE_S):
        _KEPT.append((handle, memory))  # the library may still write there
        return {}
    found = {}
    for row, result in enumerate(handle.results()):
        if result.status is Status.OK:
            name, text = json.loads(memory[row].tobytes().rstrip(b"\0"))
            if name.encode().startswith(prefix):
                found[name.encode()] = text
    return found


def write(store: Store, name: bytes, text: str) -> None:
    """Keep a note, once; a place that somebody else takes at the same moment is passed over."""
    content = json.dumps([name.decode(), text]).encode()
    family = _family(name)
    if len(content) > NOTE_BYTES or name in read(store, family + b":"):
        return
    memory = np.zeros((1, NOTE_BYTES), dtype=np.uint8)
    memory[0, : len(content)] = np.frombuffer(content, dtype=np.uint8)
    for key in _keys(family):
        handle = store.put(_batch([key], memory), DEADLINE_S)
        if not handle.wait(DEADLINE_S):
            _KEPT.append((handle, memory))
            return
        if handle.results()[0].status not in (Status.EXISTS, Status.BUSY):
            return


def _batch(keys: list[bytes], memory: np.ndarray) -> Batch:
    addresses = memory.ctypes.data + np.arange(len(keys), dtype=np.int64)[:, None] * memory.strides[0]
    return Batch(keys, addresses, np.array([NOTE_BYTES], dtype=np.int64))


_KEPT: list[object] = []  # memory of calls that were given up
