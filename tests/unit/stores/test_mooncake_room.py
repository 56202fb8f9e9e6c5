"""What finds no room in the pool, or in the read buffer of a disk, is offered again, and nothing else is."""

import threading
import time

from kvpool.stores.base import Result, Status
from kvpool.stores.mooncake import codes
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


def test_a_store_that_closes_does_not_wait_for_the_read_buffer():
    closing, asked = threading.Event(), []
    threading.Timer(0.3, closing.set).start()
    begun = time.monotonic()
    (result,) = through_buffer(1, begun + 30, overflowing(0, asked), closing)
    assert result.code == codes.OVERFLOW
    assert time.monotonic() - begun < 20
