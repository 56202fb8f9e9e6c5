"""The channel and offers: nothing unsigned is believed, nothing waits for ever."""

from __future__ import annotations

import os
import threading
import time

import msgspec
import pytest
import zmq

from kvpool.core.signing import sign
from kvpool.ops.services.ports import free_port
from kvpool.options import OptionError
from kvpool.transfer import channel
from kvpool.transfer import secret as secrets_module
from kvpool.transfer.channel import _MAGIC, Caller, ChannelError, Responder
from kvpool.transfer.ledger import Ledger
from kvpool.transfer.messages import PROTOCOL, Begin, End, Gone, Held, Hello, Refused, Release, Wait, Welcome
from kvpool.transfer.offer import Offer, OfferError, read_offer
from kvpool.transfer.release import release_params
from kvpool.transfer.secret import Secret, find_secret
from kvpool.transfer.service import TransferService, disagreement, pool_differences

SECRET = Secret(b"secret", "shared")
HELLO = Hello('{"a":1}', 1, "local_host")


@pytest.fixture
def served():
    """A responder with a real service behind it; ``served.service``, ``served.line()``."""

    class Served:
        def __init__(self):
            self.ledger = Ledger(1, 600.0)
            self.service = TransferService(self.ledger, 1, "local_host", {})
            self.port = free_port()
            self.responder = Responder("127.0.0.1", self.port, SECRET.value, lambda request: self.service.answer(request))
            self.callers = []

        def line(self, secret=SECRET.value):
            self.callers.append(Caller(secret))
            return self.callers[-1].line("127.0.0.1", self.port)

    made = Served()
    yield made
    made.responder.close()
    for caller in made.callers:
        caller.close()


def test_question_and_answer(served):
    with served.line() as line:
        assert line.ask(HELLO, 20.0) == Wait()
        served.service.record = '{"a":1}'
        assert line.ask(HELLO, 20.0) == Welcome(served.service.instance, ())
        assert isinstance(line.ask(End("x", served.service.instance, "A", 0), 20.0), Gone)
        assert isinstance(line.ask(Begin("x", "older", "A", 0, "p"), 20.0), Gone)


def test_another_secret_is_refused_by_name_on_both_sides(served):
    with served.line(b"other") as line, pytest.raises(ChannelError, match="KVPOOL_SECRET"):
        line.ask(HELLO, 20.0)


def raw(served, *frames, wait_s=20.0):
    """The frames of the answer; None where none came in time."""
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    try:
        socket.connect(f"tcp://127.0.0.1:{served.port}")
        socket.send_multipart(list(frames))
        return socket.recv_multipart() if socket.poll(int(wait_s * 1000)) else None
    finally:
        socket.close(0)
        context.term()


def signed(body, head=_MAGIC + bytes(16)):
    return head, body, sign(SECRET.value, head + body)


@pytest.mark.parametrize(
    ("frames", "told"),
    [
        (signed(b"\xc1 no msgpack"), "makes no sense"),
        (signed(msgspec.msgpack.encode({"type": "unknown"})), "makes no sense"),
        (signed(msgspec.msgpack.encode(HELLO), b"kvpool-transfer-9:" + bytes(16)), f"protocol {PROTOCOL}"),
        (signed(msgspec.msgpack.encode(HELLO), b"short"), f"protocol {PROTOCOL}"),
        ((_MAGIC + bytes(16), msgspec.msgpack.encode(HELLO), b""), "signature"),
    ],
    ids=range(5),
)
def test_nonsense_is_refused_and_the_thread_lives(served, frames, told):
    reply = raw(served, *frames)
    answer = msgspec.msgpack.decode(reply[1], type=Refused)
    assert told in answer.reason
    with served.line() as line:
        assert line.ask(HELLO, 20.0) == Wait()


def test_frames_of_another_number_get_no_answer(served):
    assert raw(served, b"one", wait_s=0.5) is None
    with served.line() as line:
        assert line.ask(HELLO, 20.0) == Wait()


def test_an_answer_that_raises_is_a_refusal(served, monkeypatch):
    monkeypatch.setattr(served.service, "answer", lambda request: 1 // 0)
    with served.line() as line:
        assert line.ask(HELLO, 20.0) == Refused("internal error of the prefill side: ZeroDivisionError")


def test_nobody_there_is_an_error_in_time():
    caller, began = Caller(b"x"), time.monotonic()
    with caller.line("127.0.0.1", free_port()) as line, pytest.raises(ChannelError, match="no answer"):
        line.ask(HELLO, 0.2)
    assert time.monotonic() - began < 10
    caller.close()


def test_close_ends_questions_under_way_and_leaves_their_sockets_to_their_threads():
    caller, port, told = Caller(b"x"), free_port(), []

    def asks():
        try:
            with caller.line("127.0.0.1", port) as line:
                begun.set()
                line.ask(HELLO, 60.0)
        except Exception as error:
            told.append(error)

    threads = []
    for _ in range(4):
        begun = threading.Event()
        threads.append(threading.Thread(target=asks, daemon=True))
        threads[-1].start()
        assert begun.wait(10)
    caller.close()
    caller.close()
    for thread in threads:
        thread.join(60)
    assert [type(error) for error in told] == [ChannelError] * 4
    assert "this side has ended" in str(told[0])
    with pytest.raises(ChannelError, match="this side has ended"):
        caller.line("127.0.0.1", port)


def test_close_does_not_take_the_socket_of_a_thread_that_is_at_something_else(monkeypatch):
    """As in a long read between begin and end."""
    monkeypatch.setattr(channel, "_CLOSE_S", 0.1)
    caller = Caller(b"x")
    with caller.line("127.0.0.1", free_port()) as line:
        caller.close()
        with pytest.raises(ChannelError, match="this side has ended"):
            line.ask(HELLO, 5.0)
    caller.close()


def test_old_answers_are_not_taken_for_new_ones(served):
    with served.line() as line:
        with pytest.raises(ChannelError):
            line.ask(HELLO, 0.0)
        assert isinstance(line.ask(End("x", served.service.instance, "A", 0), 20.0), Gone)


# ---- offers --------------------------------------------------------------------------------------------------------------------

OFFER = Offer("0" * 31 + "a", "instance", "127.0.0.1", 20001, 77, 480)


def test_an_offer_survives_its_way():
    params = OFFER.to_params(SECRET, "engine", "request", [[1, 2]])
    assert read_offer(params, SECRET) == OFFER
    assert params["do_remote_prefill"] is True
    assert params["remote_block_ids"] == [[1, 2]]


@pytest.mark.parametrize(
    "change",
    [
        {"transfer_id": "../../x"},
        {"transfer_id": 5},
        {"remote_host": "tcp://evil"},
        {"remote_host": "10.0.0.1"},
        {"remote_port": 0},
        {"remote_port": True},
        {"remote_port": "20001"},
        {"transfer_tokens": 78},
        {"transfer_instance": None},
        {"transfer_signature": "not base64 !"},
        {"transfer_protocol": str(PROTOCOL)},
    ],
    ids=str,
)
def test_a_changed_offer_is_none(change):
    with pytest.raises(OfferError) as caught:
        read_offer({**OFFER.to_params(SECRET, "engine", "request", []), **change}, SECRET)
    assert "\n" not in str(caught.value)


def test_differing_kinds_of_secret_are_explained():
    params = OFFER.to_params(Secret(b"x", "host"), "engine", "request", [])
    with pytest.raises(OfferError, match="prefill signs with 'host', decode with 'shared'"):
        read_offer(params, SECRET)


def test_bc_137_a_proxy_can_release_what_nobody_will_read(served):
    served.ledger.open(OFFER.transfer_id, "p", ((1,),), staged=False)
    offer = Offer(OFFER.transfer_id, served.service.instance, "127.0.0.1", served.port, 1, 480)
    assert release_params(offer.to_params(SECRET, "e", "r", []), SECRET, "the client has gone")
    assert [c.reason for c in served.ledger.take_closed()] == ["the client has gone"]


def test_release_is_held_for_an_older_instance(served):
    served.ledger.open(OFFER.transfer_id, "p", ((1,),), staged=False)
    with served.line() as line:
        assert isinstance(line.ask(Release(OFFER.transfer_id, "older", "x"), 20.0), Gone)
        assert line.ask(Release(OFFER.transfer_id, served.service.instance, "x"), 20.0) == Held()


# ---- secrets -------------------------------------------------------------------------------------------------------------------


def test_which_secret(monkeypatch, tmp_path):
    monkeypatch.setattr(secrets_module, "default_root", lambda: tmp_path / "root")
    assert find_secret({"KVPOOL_SECRET": "x" * 16}, "10.0.0.1") == Secret(b"x" * 16, "shared")
    with pytest.raises(OptionError, match=r'^KVPOOL_SECRET="5 characters": accepted: at least 16 characters$'):
        find_secret({"KVPOOL_SECRET": "short"}, "127.0.0.1")
    assert find_secret({}, "10.0.0.1") == Secret(b"", "none")
    first = find_secret({}, "127.0.0.1")
    assert first.kind == "host"
    assert len(first.value) == 32
    assert find_secret({"KVPOOL_SECRET": ""}, "::1") == first
    assert [path.name for path in (tmp_path / "root").iterdir()] == [".transfer-secret"]
    (tmp_path / "root" / ".transfer-secret").write_bytes(b"cut")
    with pytest.raises(OSError, match="damaged"):
        find_secret({}, "127.0.0.1")
    os.chmod(tmp_path / "root", 0o755)
    with pytest.raises(PermissionError):
        find_secret({}, "127.0.0.1")


# ---- what is said --------------------------------------------------------------------------------------------------------------


def test_disagreement_names_fields_and_both_values():
    assert disagreement('{"a":1}', '{"a":1}') == ""
    assert disagreement('{"a":1,"b":2}', '{"a":1,"b":3}') == "KV of different kinds (b: 2 on prefill, 3 on decode)"
    assert "cannot be read" in disagreement("{", "[]")


def test_pools_are_compared_only_where_both_have_one():
    ours = {"backend": "local", "address": "x", "tenant": "default"}
    assert pool_differences({}, ours) == pool_differences(ours, ours) == []
    assert pool_differences(ours, {**ours, "tenant": "t"}) == ["pool tenant: 'default' on prefill, 't' on decode"]
