"""What finds no room in the pool, or in the read buffer of a disk, is offered again, and nothing else is."""

import threading
import time
from types import SimpleNamespace

import numpy as np
from tests.waiting import eventually

from kvpool.options.mooncake_json import MooncakeOptions
from kvpool.stores.base import Batch, Result, Status
from kvpool.stores.context import StoreContext
from kvpool.stores.mooncake import MooncakeStore, codes
from kvpool.stores.mooncake.room import through_buffer, with_room


def test_no_room_is_offered_again_and_only_that():
    asked = []

    def attempt(rows):
        asked.append(list(rows))
        full = {1, 2} if len(asked) == 1 else {2}
        return [Result(Status.NO_SPACE if row in full else Status.OK) for row in rows]

    begun = time.monotonic()
    results = with_room(4, begun + 1.0, attempt)
    assert [r.status for r in results] == [Status.OK, Status.OK, Status.NO_SPACE, Status.OK]
    assert asked[:3] == [[0, 1, 2, 3], [1, 2], [2]]
    assert time.monotonic() - begun < 10


def overflowing(room, asked):
    """A disk whose buffer takes ``room`` objects at one time."""

    def attempt(rows):
        asked.append(list(rows))
        return [codes.failure(codes.OVERFLOW) if len(rows) > room else Result(Status.OK) for _ in rows]

    return attempt


def test_what_does_not_fit_into_the_read_buffer_is_read_in_ever_smaller_parts():
    asked = []
    results = through_buffer(8, time.monotonic() + 60, overflowing(1, asked), threading.Event())
    assert [result.status for result in results] == [Status.OK] * 8
    assert [len(rows) for rows in asked] == [8, 4, 4, 2, 2, 2, 2, *[1] * 8]
    assert asked[-8:] == [[row] for row in range(8)]


def test_a_single_object_waits_for_the_read_buffer_until_the_deadline_and_no_longer():
    begun, asked = time.monotonic(), []

    def busy(rows):
        asked.append(list(rows))
        return [codes.failure(codes.OVERFLOW) if time.monotonic() < begun + 0.3 else Result(Status.OK)]

    assert through_buffer(1, begun + 30, busy, threading.Event())[0].status is Status.OK
    assert time.monotonic() - begun < 25
    assert asked == [[0]] * len(asked)
    begun = time.monotonic()
    (result,) = through_buffer(1, begun + 0.5, overflowing(0, []), threading.Event())
    assert (result.status, result.code) == (Status.TRANSIENT, codes.OVERFLOW)
    assert time.monotonic() - begun < 10


class FullDisk:
    """A client whose reads never fit into the buffer."""

    def __init__(self):
        self.reads = 0
        self.closed = False

    def batch_get_into_multi_buffers(self, names, *_):
        self.reads += 1
        return [codes.OVERFLOW] * len(names)

    def get_hostname(self):
        return "h"

    def close(self):
        self.closed = True
        return 0


def test_a_store_that_closes_ends_gets_that_wait_for_the_read_buffer(monkeypatch):
    options = MooncakeOptions(master_server_address="127.0.0.1:1", protocol="tcp", global_segment_size=0)
    store, client = MooncakeStore(options, StoreContext(role="tool")), FullDisk()

    def connected():
        store._client = client
        store._library = SimpleNamespace(put_config=lambda **_: None, has_ranges=True)

    monkeypatch.setattr(store, "_connect", connected)
    store.open()
    memory = np.zeros((1, 64), dtype=np.uint8)
    handle = store.get(Batch([b"a"], np.array([[memory.ctypes.data]], dtype=np.int64), np.array([64], dtype=np.int64)), 60.0)
    eventually(lambda: client.reads > 2, "it is asked for again")
    assert not handle.done()
    store.close()
    assert handle.done()
    assert client.closed, "a library under a running call would have been left open"
    assert handle.results()[0].code == codes.OVERFLOW
