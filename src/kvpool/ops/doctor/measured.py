"""The measuring process: `python -m kvpool.ops.doctor.measured <request>` prints one line for `measuring`."""

from __future__ import annotations

import json
import os
import secrets
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from kvpool.ops.doctor.measuring import MARK, Measured
from kvpool.options.ascend_store import BackendName
from kvpool.options.backend_file import read_backend_file
from kvpool.options.deployment import Deployment
from kvpool.stores import build_store
from kvpool.stores.base import Batch, Handle, Status, Store
from kvpool.stores.context import Device, Role, StoreContext

COUNT, OBJECT = 64, 1 << 20
POOL = 160 << 20
ROUNDS = 3
CALL_S, GRACE_S = 20.0, 5.0
LEASE_S = 45.0
ROLES: dict[str, Role] = {"mooncake": "scheduler", "memcache": "worker", "yuanrong": "tool"}
"""The least that can put: a scheduler of Mooncake learns its lease and gives no memory; a tool of MemCache cannot put."""


def main(request: dict[str, Any]) -> None:
    """The answer is printed before the store is closed: a library may hang or crash then."""
    os.environ.update(request["env"])
    try:
        store = _build(request)
        store.open()
    except (ValueError, OSError, ImportError) as error:
        _tell(Measured(error=f"the store does not open: {error}"))
        return
    try:
        _tell(measure_store(store))
    finally:
        store.close()


def _tell(answer: Measured) -> None:
    print(MARK + json.dumps(asdict(answer)), flush=True)


def _build(request: dict[str, Any]) -> Store:
    if request["backend"] == "local":
        return build_store("local", root=request["root"], name="doctor", dram_bytes=POOL)
    device = cast(Device, request["device"])
    file = read_backend_file(cast(BackendName, request["backend"]), os.environ, Deployment(device=device))
    assert file is not None, "every store but local has a configuration"
    context = StoreContext(ROLES[request["backend"]], device)
    return build_store(request["backend"], config=file.options, conf_path=file.path, context=context)


def measure_store(store: Store) -> Measured:
    """Rounds of put, get, compare and remove, each with keys of its own."""
    source = np.random.default_rng().integers(0, 256, (COUNT, OBJECT), dtype=np.uint8)
    target = np.zeros_like(source)
    store.register([(memory.ctypes.data, memory.nbytes) for memory in (source, target)])
    put_s, get_s, same, namespace = [], [], True, secrets.token_hex(8)
    for turn in range(ROUNDS):
        keys = [f"v1:{namespace}:g0:h0-0_l0-0_c0_0:{turn:02x}{number:04x}".encode() for number in range(COUNT)]
        target[:] = 0
        try:
            put_s.append(_timed(store.put, _batch(keys, source)))
            get_s.append(_timed(store.get, _batch(keys, target)))
        except OSError as error:
            return Measured(error=str(error))
        finally:
            store.remove(keys)
        same = same and bool(np.array_equal(source, target))
    nbytes = source.nbytes / 1e9
    return Measured(nbytes / min(put_s), nbytes / min(get_s), same, _lease_s(store))


def _batch(keys: Sequence[bytes], memory: NDArray[np.uint8]) -> Batch:
    addresses = memory.ctypes.data + np.arange(len(keys), dtype=np.int64)[:, None] * OBJECT
    return Batch(keys, addresses, np.array([OBJECT], dtype=np.int64))


def _timed(call: Callable[[Batch, float], Handle], batch: Batch) -> float:
    """Seconds; OSError where an object did not move."""
    began = time.monotonic()
    handle = call(batch, CALL_S)
    if not handle.wait(CALL_S + GRACE_S):
        raise OSError(f"a {call.__name__} was not done after {CALL_S + GRACE_S:g} s")
    seconds = time.monotonic() - began
    failed = [result for result in handle.results() if result.status is not Status.OK]
    if failed:
        text = f"{call.__name__}: {len(failed)} of {COUNT} objects failed: {failed[0].status.value} {failed[0].text}"
        raise OSError(text.rstrip())
    return seconds


def _lease_s(store: Store) -> float | None:
    """Mooncake measures its lease in the background, which takes as long as one lasts."""
    from kvpool.stores.mooncake import MooncakeStore

    return store.wait_lease(LEASE_S) if isinstance(store, MooncakeStore) else None


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
