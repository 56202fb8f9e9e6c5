"""What prefill keeps for decode, and for how long: whatever fails, its blocks come back."""

from __future__ import annotations

import pytest

from kvpool.engine.threads import WorkerThreads
from kvpool.ops.services.ports import free_port
from kvpool.transfer import release
from kvpool.transfer.channel import Caller
from kvpool.transfer.offer import Offer
from tests.contract.content import expected_output
from tests.contract.pair import ASK

PROMPT = list(range(100, 200))


def test_releases_to_a_dead_prefill_do_not_delay_others(pair, monkeypatch):
    both, asked = pair("process_vm"), []
    side = both.decode.side
    line, dead_port, alive_port = Caller.line, free_port(), both.prefill.spec.port
    monkeypatch.setattr(Caller, "line", lambda caller, host, port: asked.append(port) or line(caller, host, port))
    monkeypatch.setattr(release, "ANSWER_S", 0.1)
    dead, alive = (Offer("0" * 32, "x", "127.0.0.1", port, 5) for port in (dead_port, alive_port))
    assert not side._releaser.release(dead, "first")
    for _ in range(20):
        side._release(dead, "again")
    side._release(alive, "now")
    both.decode.until(lambda: alive_port in asked)
    assert asked == [dead_port, dead_port, alive_port]


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
