"""Nothing that a client can put into a request body moves KV: only offers that prefill has signed, for their own prompt."""

from __future__ import annotations

import time

import pytest

from kvpool.core.signed_fields import sign_fields
from kvpool.transfer.offer import is_transfer_id
from tests.contract.content import expected_output
from tests.contract.pair import ASK

PROMPT = list(range(100, 200))


@pytest.mark.parametrize(
    "change",
    [
        {"remote_host": "10.0.0.1"},
        {"remote_port": 1},
        {"transfer_id": "0" * 32},
        {"transfer_instance": "x"},
        {"transfer_tokens": 5},
        {"transfer_signature": "AAAA"},
        {"transfer_signature": None},
        {"transfer_protocol": 99},
    ],
    ids=str,
)
def test_params_that_prefill_did_not_sign_are_as_if_not_there(pair, change):
    both = pair(policy="fail")
    params = both.offer("a", PROMPT)
    assert both.decode.ask("a", PROMPT, 3, params={**params, **change}) == expected_output(PROMPT, 3)
    assert both.decode.external["a"] == 0
    both.prefill.side._ledger.drop_all("end of test")
    both.assert_clean()


@pytest.mark.parametrize(
    "params",
    [
        ASK,
        sign_fields(b"another secret", ASK),
        {**sign_fields(b"a secret of tests", ASK), "transfer_id": "0" * 32},
        sign_fields(b"a secret of tests", ASK, clock=lambda: time.time() - 700),
    ],
    ids=["unsigned", "another secret", "changed", "old"],
)
def test_prefill_keeps_nothing_for_who_does_not_know_the_secret(pair, params, caplog_vllm):
    both = pair(policy="fail")
    counts = both.prefill.count_metrics()
    both.prefill.ask("a", PROMPT, 1, params=params, signed=False)
    both.prefill.drain()
    assert "a" not in both.prefill.params
    assert len(both.prefill.side._ledger) == 0
    assert "signature of its kv_transfer_params is missing, wrong or too old" in caplog_vllm.text
    both.assert_clean()
    assert counts["withheld_offers/reason=unsigned"] == 1


def test_without_a_secret_of_the_operator_requests_need_no_signature(pair, monkeypatch):
    """On loopback the engines share one that a proxy need not know."""
    monkeypatch.delenv("KVPOOL_SECRET")
    both = pair()
    both.prefill.ask("a", PROMPT, 1, params=ASK, signed=False)
    both.prefill.drain()
    assert both.decode.ask("a", PROMPT, 3, params=both.prefill.params["a"]) == expected_output(PROMPT, 3)
    assert both.decode.external["a"] == 99
    both.assert_clean()


def test_an_offer_has_the_id_that_the_proxy_gave_it_once(pair):
    both = pair()
    asked = {**ASK, "transfer_id": "ab" * 16}
    first, second = (both.offer(name, PROMPT, asked=asked) for name in "ab")
    assert first["transfer_id"] == "ab" * 16
    assert second["transfer_id"] != first["transfer_id"]
    third = both.offer("c", PROMPT, asked={**ASK, "transfer_id": "no id"})
    assert is_transfer_id(third["transfer_id"])
    both.prefill.side._ledger.drop_all("end of test")
    both.assert_clean()


def test_what_the_proxy_has_released_before_it_was_computed_is_not_offered(pair):
    """Its client left: the release may come while a step of prefill still runs."""
    both = pair()
    counts = both.prefill.count_metrics()
    both.prefill.side._ledger.release("cd" * 16, "its prefill request ended before it was answered", force=True)
    both.prefill.ask("a", PROMPT, 1, params={**ASK, "transfer_id": "cd" * 16})
    both.prefill.drain()
    assert "a" not in both.prefill.params
    assert both.prefill.side.open_counts() == {"sendings": 0, "open": 0, "pinned": 0}
    assert both.hand_over("b", PROMPT) == expected_output(PROMPT, 3)
    both.assert_clean()
    assert (counts["withheld_offers/reason=released"], counts["offers"]) == (1, 1)


def test_an_offer_serves_only_its_own_prompt(pair):
    both = pair(policy="recompute")
    params = both.offer("a", PROMPT)
    other = [*PROMPT[:-1], 7]
    assert both.decode.ask("b", other, 3, params=params) == expected_output(other, 3)
    shorter = PROMPT[:-1]
    assert both.decode.ask("c", shorter, 3, params=params) == expected_output(shorter, 3)
    salted = both.offer("s", PROMPT, salt="mine")
    both.decode.forget_local()
    assert both.decode.ask("d", PROMPT, 3, params=salted) == expected_output(PROMPT, 3)
    both.prefill.side._ledger.drop_all("end of test")
    both.assert_clean()


def test_another_prompt_does_not_release_what_a_sibling_is_about_to_pull(pair):
    both = pair(policy="fail")
    params = both.offer("a", PROMPT)
    both.decode.add("a", PROMPT, 3, params=params)
    both.decode.add("shorter", PROMPT[:50], 3, params=params)
    both.decode.until(lambda: not both.decode.side.open_counts()["releases"])  # whatever was to be sent has been
    both.decode.run()
    assert both.decode.answers["a"].tokens == expected_output(PROMPT, 3)
    assert both.decode.external["a"] == 99
    both.assert_clean()


def test_other_fields_may_be_changed_by_a_proxy(pair):
    both = pair()
    params = both.offer("a", PROMPT)
    changed = {**params, "remote_block_ids": [[1]], "remote_engine_id": "x", "do_remote_decode": None, "more": 1}
    assert both.decode.ask("a", PROMPT, 3, params=changed) == expected_output(PROMPT, 3)
    assert both.decode.external["a"] == 99
