"""Writers and readers of Mooncake's sessions when a begin comes late or never: no key stays claimed, no session stays open."""

import threading
import time

import pytest

from kvpool.stores.base import Hit, Result, Status, Tier
from kvpool.stores.mooncake.reader import MooncakeReader
from kvpool.stores.mooncake.sessions import Link
from kvpool.stores.mooncake.writer import MooncakeWriter
from kvpool.stores.native import NativeCalls


class Client:
    """Waits at its gate before every start of a session."""

    def __init__(self):
        self.gate = threading.Event()
        self.entered = threading.Event()
        self.error = None
        self.open = set()

    def start(self, names, *_):
        self.entered.set()
        self.gate.wait(30)
        if self.error is not None:
            raise self.error
        self.open |= set(names)
        return [0] * len(names)

    def finish(self, names):
        self.open -= set(names)
        return [0] * len(names)

    batch_put_session_start = batch_get_session_start = start
    batch_put_session_revoke = batch_get_session_end = finish


@pytest.fixture
def link():
    calls = NativeCalls("test", 2)
    yield Link(
        client=Client(),
        calls=calls,
        config=None,
        trailer=False,
        host=True,
        fault=lambda error: Result(Status.TRANSIENT, text=type(error).__name__),
        look=lambda keys: [Hit(Tier.REMOTE, 64)] * len(keys),
        fetch=lambda batch, until: [],
        quarantine=lambda keys: None,
    )
    calls.close(30)


def quiet(link):
    """Until every call has run that was queued, and those that these have queued."""
    for _ in range(3):
        wait = threading.Barrier(2).wait
        assert all(call.wait(30) for call in [link.calls.begin(wait, 30) for _ in range(2)])


def test_a_begin_that_never_got_its_turn_gives_its_keys_up(link):
    held = threading.Event()
    for _ in range(2):
        link.calls.begin(lambda: held.wait(30), 30)
    writer = MooncakeWriter(link, [b"a", b"b"], 64, 0.05)
    assert [result.status for result in writer.results] == [Status.TRANSIENT] * 2
    assert link.books.writing() == []
    held.set()
    quiet(link)
    assert not link.client.entered.is_set()


def test_a_begin_that_comes_late_keeps_its_keys_until_it_is_revoked(link):
    writer = MooncakeWriter(link, [b"a"], 64, 1.0)
    assert writer.results[0].status is Status.TRANSIENT
    assert link.books.writing() == [b"a"]
    link.client.gate.set()
    quiet(link)
    assert link.books.writing() == []
    assert link.client.open == set()


@pytest.mark.parametrize("late", [True, False])
def test_a_begin_that_fails_gives_its_keys_up(link, late):
    link.client.error = TimeoutError("of the library")
    if not late:
        link.client.gate.set()
    writer = MooncakeWriter(link, [b"a"], 64, 1.0)
    assert writer.results[0].status is Status.TRANSIENT
    link.client.gate.set()
    quiet(link)
    assert link.books.writing() == []


@pytest.mark.parametrize("where", ["look", "start"])
def test_a_reader_that_begins_after_its_end_leaves_no_session(link, where):
    gate, look = link.client.gate, link.look
    if where == "look":
        link.client.gate, link.look = threading.Event(), lambda keys: (gate.wait(30), look(keys))[1]
        link.client.gate.set()
    began = time.monotonic()
    reader = MooncakeReader(link, [b"a", b"b"], 1.0)
    assert time.monotonic() - began < 10
    assert [result.status for result in reader.results] == [Status.TRANSIENT] * 2
    time.sleep(0.1)  # what its end has queued runs before the session is there
    gate.set()
    quiet(link)
    assert link.client.entered.is_set()
    assert link.client.open == set()
    assert not link.books._reading
    reader.end()
    assert not link.books._reading


def test_a_reader_that_begins_in_time_keeps_its_sessions_until_the_end(link):
    link.client.gate.set()
    reader = MooncakeReader(link, [b"a"], 30.0)
    assert link.client.open == {"a"}
    reader.end()
    quiet(link)
    assert link.client.open == set()
