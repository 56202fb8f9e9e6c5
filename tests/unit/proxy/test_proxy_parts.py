"""The small parts: addresses, estimates, admission, rendezvous, signatures."""

from __future__ import annotations

import asyncio
import json
import logging
import random

import pytest

from kvpool.core.signed_fields import ISSUED_AT, SIGNATURE, sign_fields, verify_fields
from kvpool.core.signing import sign, verify
from kvpool.options.addresses import is_loopback
from kvpool.options.errors import OptionError
from kvpool.proxy import asks, estimate, logs
from kvpool.proxy.addresses import Address, is_wildcard, pair, read_address, read_host
from kvpool.proxy.admission import Admission
from kvpool.proxy.failures import FailureError
from kvpool.proxy.rendezvous import Rendezvous

SECRET = b"a secret of sixteen"


@pytest.mark.parametrize("text", ["::1", "[::1]", "fe80::1", "localhost", "127.0.0.1", "node-3.cluster", "a_b", "x."])
def test_bc_130_hosts_of_every_kind(text) -> None:
    host = read_host("--host", text)
    assert not host.startswith("[")
    url = Address(host, 80).url
    assert url == (f"http://[{host}]:80" if ":" in host else f"http://{host}:80")


@pytest.mark.parametrize(
    "text", ["", "10.0.0.110.0.0.2", "10.0.0.1,10.0.0.2", "http://a", "a:80", "[a]", "256.1.1.1", "-a", "a b", "1.2.3"]
)
def test_bc_130_what_is_no_host_is_refused(text) -> None:
    with pytest.raises(OptionError, match="--host="):
        read_host("--host", text)


def test_bc_130_hosts_and_ports_are_pairs() -> None:
    with pytest.raises(OptionError, match="1 ports for 2 hosts"):
        pair("--hosts", ["a", "b"], "--ports", [1])
    assert pair("--hosts", ["a", "a", "a"], "--ports", [1, 2, 1]) == [Address("a", 1), Address("a", 2)]
    assert str(read_address("instances", "[::1]:8000")) == "[::1]:8000"
    for bad in ("::1:8000", "a", "a:b", "a:0", 7, None):
        with pytest.raises(OptionError, match="instances"):
            read_address("instances", bad)


@pytest.mark.parametrize(
    ("host", "wildcard", "loopback"),
    [
        ("0.0.0.0", True, False),
        ("::", True, False),
        ("0", True, False),
        ("0x0", True, False),
        ("", True, False),
        ("*", True, False),
        ("::ffff:0.0.0.0", True, False),
        ("localhost", False, True),
        ("127.8.8.8", False, True),
        ("::1", False, True),
        ("::ffff:127.0.0.1", False, True),
        ("localhost.example", False, False),
        ("10.0.0.1", False, False),
    ],
)
def test_wildcards_and_loopback_in_any_spelling(host, wildcard, loopback) -> None:
    assert (is_wildcard(host), is_loopback(host)) == (wildcard, loopback)


@pytest.mark.parametrize(
    ("body", "tokens"),
    [
        ({"prompt": "x" * 400}, 100),
        ({"prompt": list(range(70))}, 70),
        ({"prompt": ["x" * 40, "y" * 40]}, 20),
        ({"prompt": [[1, 2], [3]]}, 3),
        ({"prompt": "四" * 4}, 3),
        ({}, 1),
        ({"prompt": None}, 1),
        ({"messages": [{"role": "user", "content": "x" * 40}]}, 18),
        ({"messages": [{"content": [{"type": "text", "text": "x" * 40}, {"type": "image_url"}]}]}, 530),
        ({"messages": ["odd", 3]}, 1),
    ],
)
def test_estimated_tokens(body, tokens) -> None:
    assert estimate.tokens(body) == tokens


def test_prefixes_are_equal_for_turns_and_differ_for_models_and_salts() -> None:
    turn = {"model": "m", "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}]}
    later = {**turn, "messages": [*turn["messages"], {"role": "assistant", "content": "b"}]}
    assert estimate.prefix(turn) == estimate.prefix(later)
    assert len({estimate.prefix(one) for one in (turn, {**turn, "model": "n"}, {**turn, "cache_salt": "x"})}) == 3
    assert estimate.prefix({}) is None
    assert estimate.prefix({"prompt": [1] * 600}) == estimate.prefix({"prompt": [1] * 700})


def test_units_of_prompts_and_samples() -> None:
    units = asks.units(asks.COMPLETIONS, {"prompt": [[1], [2, 3]], "n": 2, "seed": 5})
    assert [(unit.index, unit.prompt, unit.body["prompt"], unit.body["seed"], unit.tokens) for unit in units] == [
        (0, 0, [1], 5, 1),
        (1, 0, [1], 6, 1),
        (2, 1, [2, 3], 5, 2),
        (3, 1, [2, 3], 6, 2),
    ]
    for prompt in ("a", ["a"], [1, 2], [[1, 2]]):
        (unit,) = asks.units(asks.COMPLETIONS, {"prompt": prompt})
        assert (unit.body, unit.direct) == ({"prompt": prompt}, False)
    for prompt in ([], ["a", [1]], [1, "a"]):
        (unit,) = asks.units(asks.COMPLETIONS, {"prompt": prompt})
        assert unit.direct


@pytest.mark.parametrize(
    ("more", "answers"),
    [
        ({"n": 5}, 5),
        ({"n": 5, "prompt_logprobs": 0}, 5),
        ({"n": 5, "use_beam_search": True}, 5),
        ({"n": "5"}, 5),
        ({"n": 5.0}, 5),
        ({"prompt": ["a", "b"], "n": 2, "echo": True, "logprobs": 1}, 4),
        ({"n": 0}, 1),
        ({"n": -3}, 1),
        ({"n": "many"}, 1),
        ({"n": [2]}, 1),
        ({"n": None}, 1),
    ],
    ids=str,
)
def test_answers_are_counted_also_where_decode_gets_the_request_whole(more, answers) -> None:
    raw = json.dumps({"prompt": "a", **more}).encode()
    assert asks.read(asks.COMPLETIONS, raw, {}).answers == answers


@pytest.mark.parametrize("more", [{}, {"prompt_logprobs": 0}, {"use_beam_search": True}], ids=str)
def test_too_many_answers_are_refused(more) -> None:
    for n in (257, "257"):
        with pytest.raises(FailureError, match="n=257: at most 256 answers"):
            asks.units(asks.COMPLETIONS, {"prompt": "a", "n": n, **more})


def test_admission_keeps_its_limits_whatever_happens() -> None:
    async def scenario() -> None:
        admission, dice, most = Admission(3, 100, 1000, 0.05), random.Random(3), 0

        async def one() -> str:
            nonlocal most
            try:
                async with asyncio.timeout(dice.uniform(0, 0.1)), admission.places(1):
                    most = max(most, admission.running)
                    assert admission.running <= 3
                    await asyncio.sleep(dice.uniform(0, 0.01))
                    return "served"
            except TimeoutError:
                return "left"
            except FailureError as failure:
                return str(failure.status)

        results = await asyncio.gather(*(one() for _ in range(400)))
        assert {"served", "left", "503"} <= set(results)
        assert most == 3
        assert (admission.running, admission.queued) == (0, 0)

    asyncio.run(scenario())


def test_admission_serves_in_order_and_refuses_beyond_its_queue() -> None:
    async def scenario() -> None:
        admission, order = Admission(1, 9, 2, 5), []

        async def one(number: int) -> None:
            async with admission.places(1):
                order.append(number)
                await asyncio.sleep(0.01)

        tasks = [asyncio.create_task(one(number)) for number in range(3)]
        await asyncio.sleep(0)
        with pytest.raises(FailureError) as caught:
            async with admission.places(1):
                pass
        assert (caught.value.status, caught.value.headers["retry-after"]) == (429, "3")
        await asyncio.gather(*tasks)
        assert order == [0, 1, 2]

    asyncio.run(scenario())


def test_calls_find_their_request_by_either_id_once() -> None:
    async def scenario() -> None:
        meeting = Rendezvous()
        transfer, request = asks.new_id(), asks.new_id()
        pending = meeting.expect(transfer, request)
        assert len(meeting) == 1
        assert not meeting.arrive({"request_id": f"cmpl-{asks.new_id()}-0"})
        assert not meeting.arrive({"request_id": request[:31]})
        assert not meeting.arrive({"request_id": request + "0", "transfer_id": None})
        for params in ({"request_id": f"cmpl-{request}-0", "n": 1}, {"transfer_id": transfer, "n": 2}):
            assert meeting.arrive(params)
        assert (await pending.called)["n"] == 1
        meeting.forget(pending)
        assert not meeting.arrive({"transfer_id": transfer})
        assert len(meeting) == 0

    asyncio.run(scenario())


def test_signatures_hold_for_what_was_signed_and_for_a_while() -> None:
    signed = sign_fields(SECRET, {"a": [1, {"b": None}], "é": "四"}, clock=lambda: 1000.5)
    assert verify_fields(SECRET, signed, clock=lambda: 1100)
    assert verify_fields(SECRET, dict(reversed(signed.items())), clock=lambda: 1100)
    assert not verify_fields(SECRET, signed, clock=lambda: 1700)
    assert not verify_fields(SECRET, signed, clock=lambda: 300)
    assert not verify_fields(b"another", signed, clock=lambda: 1100)
    for name in ("a", ISSUED_AT, SIGNATURE):
        for value in (1, "x", None, True):
            assert not verify_fields(SECRET, {**signed, name: value}, clock=lambda: 1100)
    assert not verify_fields(SECRET, {**signed, "more": 1}, clock=lambda: 1100)
    assert not verify_fields(SECRET, {}, clock=lambda: 1100)
    assert verify(SECRET, b"x", sign(SECRET, b"x"))
    assert not verify(SECRET, b"x", sign(SECRET, b"y"))
    assert not verify(SECRET, b"x", b"")


def test_what_the_channel_to_prefill_says_is_a_line_of_json_too(capsys) -> None:
    names = ("kvpool.proxy", "kvpool.transfer", "uvicorn", "asyncio", "aiohttp")
    before = [(one, one.handlers, one.propagate, one.level) for one in map(logging.getLogger, names)]
    try:
        logs.set_up("info")
        logging.getLogger("kvpool.transfer.release").warning("prefill is asked again: %s", "no answer")
        logging.getLogger("kvpool.transfer.release").info("of no interest")
    finally:
        for one, handlers, propagate, level in before:
            one.handlers, one.propagate = handlers, propagate
            one.setLevel(level)
    (line,) = capsys.readouterr().err.splitlines()
    told = json.loads(line)
    assert (told["level"], told["event"]) == ("warning", "prefill is asked again: no answer")
