"""What prefill keeps for decode, and for how long: whatever fails, its blocks come back."""

from __future__ import annotations

import threading
import time

import pytest

from kvpool.engine.threads import WorkerThreads
from kvpool.ops.services.ports import free_port
from kvpool.transfer import release
from kvpool.transfer.offer import Offer
from tests.contract.content import expected_output
from tests.contract.pair import ASK

PROMPT = list(range(100, 200))


def test_releases_to_a_dead_prefill_do_not_delay_others(pair, monkeypatch):
    both = pair("process_vm")
    side = both.decode.side
    monkeypatch.setattr(release, "ANSWER_S", 0.1)
    dead = [Offer(f"{number:032x}", "x", "127.0.0.1", free_port(), 5, 2) for number in range(3)]
    counted = both.decode.count_metrics()
    for offer in dead:
        for reason in "abc":
            side._release(offer, reason)
    params = both.offer("a", PROMPT)
    both.decode.add("shorter", PROMPT[:50], 3, params=params)
    both.prefill.until(lambda: not len(both.prefill.side._ledger))
    both.decode.run()
    assert side.open_counts()["releases"] == 9, "the dead are asked on"
    both.decode.until(lambda: not side.open_counts()["releases"])
    both.decode.ask("b", PROMPT, 3)
    assert {name: count for name, count in counted.items() if name.startswith("releases")} == {
        "releases/reason=told": 1,
        "releases/reason=unreachable": 9,
    }
    both.assert_clean()


def test_a_prefill_that_answers_late_hears_at_last_what_nobody_reads(pair, monkeypatch):
    """It is busy for longer than a question is waited for; its blocks are free soon afterwards, not when their time is up."""
    both, busy = pair("process_vm"), threading.Event()
    monkeypatch.setattr(release, "ANSWER_S", 0.1)
    monkeypatch.setattr(release, "RETRY_MOST_S", 0.2)
    service = both.prefill.side._service
    answer = service.answer
    monkeypatch.setattr(both.prefill.side._responder, "_answer", lambda request: (busy.wait(30), answer(request))[1])
    params = both.offer("a", PROMPT)
    both.decode.add("shorter", PROMPT[:50], 3, params=params)
    time.sleep(0.6)
    both.prefill.side.sweep()
    assert both.prefill.side.open_counts()["pinned"] > 0
    busy.set()
    both.decode.run()
    both.assert_clean()


@pytest.mark.parametrize("why", ["raises", "never ran"])
def test_a_copy_that_fails_unforeseen_is_reported(pair, monkeypatch, why):
    both = pair("local_host", policy="recompute")
    worker = both.prefill.workers[0]
    if why == "raises":
        monkeypatch.setattr(worker, "_copy_out", lambda *args: 1 // 0)
    else:  # the thread could not start
        worker._threads.close(5.0)
        worker._threads = WorkerThreads("transfer", 1, lambda: (_ for _ in ()).throw(OSError("no device")))
    both.hand_over("a", PROMPT)
    assert both.decode.answers["a"].tokens == expected_output(PROMPT, 3)
    both.assert_clean()


def test_a_copy_that_is_never_reported_is_waited_for_until_its_time_is_up(pair, monkeypatch):
    monkeypatch.setenv("VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT", "3")
    both = pair("local_host")
    worker = both.prefill.workers[0]
    take = worker.take_report
    monkeypatch.setattr(worker, "take_report", lambda: (take(), None)[1])
    both.prefill.ask("a", PROMPT, 1, params=ASK)
    assert both.prefill.side.open_counts()["pinned"] > 0
    both.assert_clean()


def test_offers_never_take_much_more_than_half_of_the_blocks(pair):
    both = pair("process_vm", {"num_blocks": 41})
    counted = both.prefill.count_metrics()
    for i in range(5):
        both.prefill.ask(f"a{i}", [i, *PROMPT[1:]], 1, params=ASK)
    assert sorted(both.prefill.params) == ["a0", "a1", "a2"], "7 blocks each"
    both.prefill.side._ledger.drop_all("end of test")
    both.assert_clean()
    assert counted["withheld_offers/reason=blocks"] == 2
