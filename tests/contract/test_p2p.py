"""Prefill and decode, each under vLLM's own scheduler: every byte that decode reads is compared with what it must be."""

from __future__ import annotations

import time

import pytest

from kvpool.engine.p2p import worker as workers
from kvpool.engine.p2p.metric_table import TRANSFER_METRICS
from kvpool.engine.stats import split_name
from kvpool.stores.base import Result, Status
from kvpool.transfer import ledger as ledgers
from kvpool.transfer.channel import ChannelError, Line
from kvpool.transfer.messages import End
from kvpool.transfer.pull import PullError
from tests.contract.content import expected_output
from tests.contract.harness import OracleError
from tests.contract.pair import ASK

PROMPT = list(range(100, 200))
SLIDING = (("full", 0), ("sliding", 32))
engines = pytest.mark.parametrize("engine", ["local_host", "process_vm"])
policies = pytest.mark.parametrize("policy", ["recompute", "fail"])


# ---- what arrives is exactly what prefill computed ----------------------------------------------------------------------------


@engines
@pytest.mark.parametrize(
    ("prefill", "decode", "common"),
    [
        ({}, {}, {}),
        ({"tp": 2}, {}, {}),
        ({"tp": 4}, {"tp": 2}, {"heads": 4}),
        ({"tp": 4}, {"tp": 2}, {"heads": 2}),
        ({"tp": 4}, {}, {"heads": 1}),
        ({"pp": 2}, {}, {}),
        ({"tp": 2, "pp": 2}, {"tp": 2}, {}),
        ({}, {}, {"groups": SLIDING}),
        ({"tp": 2}, {}, {"groups": SLIDING}),
        ({"max_tokens_per_step": 32}, {"num_blocks": 40}, {"groups": SLIDING}),
    ],
    ids=str,
)
def test_bc_017_decode_gets_exactly_its_heads_and_layers(pair, engine, prefill, decode, common):
    both = pair(engine, prefill, decode, **common)
    for name, prompt in (("a", PROMPT), ("b", PROMPT[:96]), ("c", PROMPT[:97]), ("d", [7, 8, 9]), ("e", PROMPT[::-1] * 2)):
        assert both.hand_over(name, prompt) == expected_output(prompt, 3)
        both.decode.forget_local()
        assert both.decode.external[name] == len(prompt) - 1
    both.assert_clean()


@engines
def test_the_oracle_notices_a_wrong_byte(pair, engine, monkeypatch):
    both = pair(engine)
    params = both.offer("a", PROMPT)
    if engine == "process_vm":
        both.prefill.ranks[0].memory[:, 3] += 1
    else:
        moved = both.decode.workers[0]._engine
        fetch = moved.fetch
        monkeypatch.setattr(moved, "fetch", lambda batch, left: (fetch(batch, left), both.decode.ranks[0].memory.__iadd__(1))[0])
    with pytest.raises(OracleError):
        both.decode.ask("a", PROMPT, 3, params=params)


@engines
def test_many_at_once_and_local_prefixes(pair, engine):
    both = pair(engine, {"num_blocks": 256}, {"num_blocks": 128})
    prompts = {f"r{i}": PROMPT[: 40 + 5 * i] + [900 + i] * i for i in range(8)}
    for name, prompt in prompts.items():
        both.prefill.add(name, prompt, 1, params=ASK)
    both.prefill.run()
    both.prefill.drain()
    for name, prompt in prompts.items():
        both.decode.add(name, prompt, 4, params=both.prefill.params[name])
    both.decode.run()
    for name, prompt in prompts.items():
        assert both.decode.answers[name].tokens == expected_output(prompt, 4)
    longer = [*PROMPT, *range(300, 340)]
    both.hand_over("again", PROMPT)
    both.hand_over("longer", longer)
    assert 0 < both.decode.external["longer"] < len(longer) - 1, "decode pulls only what it lacks"
    both.assert_clean()


@engines
def test_bc_068_what_decode_holds_by_itself_is_not_pulled(pair, engine):
    both = pair(engine)
    prompt = PROMPT[:97]
    both.hand_over("a", prompt)
    received = []
    worker = both.decode.workers[0]
    take = worker.take_finished
    worker.take_finished = lambda: received.append(found := take()) or found
    both.hand_over("b", prompt)
    assert both.decode.external["b"] == 0
    assert not any(done for done, _ in received)
    both.assert_clean()  # prefill was told


@pytest.mark.parametrize("caching", [True, False])
def test_several_answers_to_one_prompt_share_one_offer(pair, caching):
    both = pair("process_vm", {}, {"prefix_caching": caching})
    params = both.offer("a", PROMPT)
    for i in range(3):
        both.decode.add(f"a{i}", PROMPT, 3, params=params)
    both.decode.run()
    assert sorted(both.decode.external[f"a{i}"] for i in range(3)) == [0, 0, 99]
    assert both.decode.ask("later", PROMPT, 3, params=params) == expected_output(PROMPT, 3)
    both.assert_clean()


def test_aborted_twins_leave_the_offer_to_the_last(pair):
    both = pair("process_vm")
    params = both.offer("a", PROMPT)
    for i in range(3):
        both.decode.add(f"a{i}", PROMPT, 3, params=params)
    both.decode.abort("a0", "a1")
    both.decode.run(["a2"])
    assert both.decode.external["a2"] == 99
    both.assert_clean()


# ---- lifecycle ---------------------------------------------------------------------------------------------------------------


@engines
def test_bc_134_what_nobody_reads_is_freed_when_its_time_is_up(pair, engine, monkeypatch, caplog_vllm):
    monkeypatch.setenv("VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT", "600")
    both = pair(engine)
    params = [both.offer(f"n{i}", [*PROMPT[:30], 500 + i]) for i in range(10)]
    assert both.decode.ask("pulled", [*PROMPT[:30], 500], 2, params=params[0]) == expected_output([*PROMPT[:30], 500], 2)
    free = both.prefill.blocks.get_num_free_blocks
    both.prefill.side._ledger._clock = lambda: time.monotonic() + 601
    late = both.decode.ask("late", [*PROMPT[:30], 503], 2, params=params[3]) if both.decode.spec.policy == "recompute" else None
    assert late is None
    both.prefill.ask("new", PROMPT[:40])
    assert free() == both.prefill.spec.num_blocks - 1
    assert "had not read it after 600 s" in caplog_vllm.text
    both.assert_clean()


@policies
@engines
def test_bc_140_a_failed_read_ends_by_policy_on_both_sides(pair, engine, policy, monkeypatch):
    both = pair(engine, {}, {"tp": 1}, policy=policy)
    moved = both.decode.workers[0]._engine
    call = "read" if engine == "process_vm" else "fetch"
    monkeypatch.setattr(moved, call, lambda *args: Result(Status.FATAL, code=-1, text="broken"))
    both.hand_over("a", PROMPT)
    assert_by_policy(both, "a", policy)
    monkeypatch.undo()
    monkeypatch.setenv("KVPOOL_SECRET", "a secret of tests")
    assert both.hand_over("b", PROMPT[:50]) == expected_output(PROMPT[:50], 3)
    both.assert_clean()


@policies
@pytest.mark.parametrize("error", [AssertionError(), ValueError("broken"), MemoryError()], ids=repr)
def test_an_error_that_nobody_foresaw_is_a_failed_pull(pair, policy, error, monkeypatch):
    both = pair("process_vm", policy=policy)
    moved = both.decode.workers[0]._engine
    monkeypatch.setattr(moved, "read", lambda *args: (_ for _ in ()).throw(error))
    both.hand_over("a", PROMPT)
    assert_by_policy(both, "a", policy)
    both.assert_clean()


@policies
@pytest.mark.parametrize("rank", [0, 1])
def test_one_rank_that_fails_fails_the_request(pair, policy, rank, monkeypatch):
    both = pair("process_vm", {"tp": 2}, {"tp": 2}, policy=policy)
    moved = both.decode.workers[rank]._engine
    monkeypatch.setattr(moved, "read", lambda *args: Result(Status.FATAL, text="broken"))
    both.hand_over("a", PROMPT)
    assert_by_policy(both, "a", policy)
    both.assert_clean()


def test_a_rank_that_never_begins_does_not_keep_the_blocks(pair, monkeypatch):
    """One rank reads and ends, the other fails before it has said anything: prefill is told when both have returned."""
    both = pair("process_vm", {"tp": 2}, {"tp": 2}, policy="recompute")
    monkeypatch.setattr(both.decode.workers[1], "_meet_puller", lambda probe: (_ for _ in ()).throw(PullError("broken")))
    both.hand_over("a", PROMPT)
    assert_by_policy(both, "a", "recompute")
    both.assert_clean()


def test_a_request_id_that_is_used_again_is_another_transfer(pair):
    both = pair("process_vm")
    offers = {tuple(p): both.offer("same", p) for p in (PROMPT, PROMPT[::-1])}
    assert len({o["transfer_id"] for o in offers.values()}) == 2
    for prompt, params in offers.items():
        assert both.decode.ask("same", list(prompt), 3, params=params) == expected_output(list(prompt), 3)
        assert both.decode.external["same"] == 99
    both.assert_clean()


def assert_by_policy(both, name, policy):
    answer = both.decode.answers[name]
    if policy == "recompute":
        assert answer.tokens == expected_output(PROMPT, 3)
    else:
        assert answer.reason == "error"


@policies
@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({"block_size": 32}, "groups"),
        ({"pull": {"cache_namespace": "another"}}, "model"),
        ({"layers": 1}, "num_layers"),
        ({"pull": {"transfer_engine": "process_vm"}}, "transfer_engine"),
        ({"pull": {"decode": {"tp_size": 1, "dp_size": 1}}, "tp": 1}, "decode.tp_size"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bc_078_bc_141_engines_that_do_not_fit_refuse_and_name_the_field(pair, policy, other, named, caplog_vllm):
    prefill = {"tp": 2} if named == "decode.tp_size" else {}
    if named == "decode.tp_size":
        prefill["pull"] = {"decode": {"tp_size": 2, "dp_size": 1}}
    both = pair("local_host", prefill, other, policy=policy)
    both.hand_over("a", PROMPT)
    assert_by_policy(both, "a", policy)
    assert named in caplog_vllm.text
    both.decode.ask("still alive", PROMPT[:20])
    both.assert_clean()  # prefill was told that nobody will read it


@policies
def test_prefill_is_gone(pair, policy, monkeypatch):
    """What it should be told waits until the offer's time is up."""
    monkeypatch.setenv("VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT", "10")
    both = pair(policy=policy)
    params = both.offer("a", PROMPT)
    both.prefill.scheduler.connector.shutdown()
    began = time.monotonic()
    both.decode.ask("a", PROMPT, 3, params=params)
    assert_by_policy(both, "a", policy)
    assert time.monotonic() - began < 40
    both.decode.ask("b", PROMPT, 3, params=params)
    both.decode.settle(20.0)


def test_prefill_has_restarted_at_the_same_place(pair):
    both = pair(policy="recompute")
    both.hand_over("before", PROMPT)
    old = both.offer("a", PROMPT)
    both.prefill.close()
    again = pair(policy="recompute", port=both.prefill.spec.port)
    fresh = again.offer("b", PROMPT[:60])
    both.decode.forget_local()
    both.decode.ask("a", PROMPT, 3, params=old)
    assert both.decode.answers["a"].tokens == expected_output(PROMPT, 3)
    both.decode.ask("b", PROMPT[:60], 3, params=fresh)
    assert both.decode.answers["b"].tokens == expected_output(PROMPT[:60], 3)
    again.assert_clean()


@engines
def test_aborts_on_decode_release_prefill(pair, engine, monkeypatch):
    both = pair(engine)
    moved = both.decode.workers[0]._engine
    call = "read" if engine == "process_vm" else "fetch"
    real = getattr(moved, call)
    monkeypatch.setattr(moved, call, lambda *args: (time.sleep(0.1), real(*args))[1])
    for i in range(6):
        prompt = [*PROMPT[:50], i]
        params = both.offer(f"a{i}", prompt)
        both.decode.add(f"a{i}", prompt, 3, params=params)
        if i % 3:
            both.decode.step()
        if i % 3 == 2:
            time.sleep(0.15)
        both.decode.abort(f"a{i}")
    both.assert_clean()


def test_aborts_on_prefill_offer_nothing(pair):
    both = pair()
    both.prefill.add("a", PROMPT, 5, params=ASK)
    both.prefill.step()
    both.prefill.abort("a")
    both.prefill.drain()
    assert "a" not in both.prefill.params
    both.assert_clean()


@policies
def test_a_full_transfer_buffer_refuses_the_new_offer(pair, policy, monkeypatch):
    """What is offered already stays; the new one waits a moment for room, then ends by policy."""
    monkeypatch.setattr(workers, "ROOM_S", 1.0)
    both = pair("local_host", policy=policy)
    counts = both.prefill.count_metrics()
    old = both.offer("old", PROMPT[::-1])
    published, full = both.prefill.workers[0]._engine, Result(Status.NO_SPACE)
    tries = []
    monkeypatch.setattr(published, "publish", lambda *args: tries.append(args) or full)
    both.hand_over("a", PROMPT)
    assert_by_policy(both, "a", policy)
    assert len(tries) > 2
    monkeypatch.undo()
    monkeypatch.setenv("KVPOOL_SECRET", "a secret of tests")
    assert both.decode.ask("old", PROMPT[::-1], 3, params=old) == expected_output(PROMPT[::-1], 3)
    assert both.decode.external["old"] == len(PROMPT) - 1
    both.assert_clean()
    assert counts["unread_offers/reason=unpublished"] == 1


def test_a_transfer_buffer_that_is_full_for_a_moment_delays_the_offer(pair, monkeypatch):
    both = pair("local_host", policy="fail")
    engine = both.prefill.workers[0]._engine
    publish, tries = engine.publish, []

    def at_first_full(*args):
        tries.append(args)
        return Result(Status.NO_SPACE) if len(tries) < 3 else publish(*args)

    monkeypatch.setattr(engine, "publish", at_first_full)
    assert both.hand_over("a", PROMPT) == expected_output(PROMPT, 3)
    assert both.decode.external["a"] == len(PROMPT) - 1
    both.assert_clean()
    both.prefill.step()
    both.prefill.until(lambda: not engine._leases)


def test_a_lost_acknowledgement_is_asked_for_again(pair, monkeypatch):
    both = pair("process_vm")
    ask, lost = Line.ask, []

    def lossy(self, request, timeout_s):
        reply = ask(self, request, timeout_s)
        if isinstance(request, End) and not lost:
            lost.append(reply)
            raise ChannelError("lost")
        return reply

    monkeypatch.setattr(Line, "ask", lossy)
    assert both.hand_over("a", PROMPT) == expected_output(PROMPT, 3)
    assert lost
    both.assert_clean()


def test_what_was_read_of_blocks_that_were_let_go_is_never_used(pair, monkeypatch):
    """Prefill's time is up in the middle of a read, and the blocks are computed over: decode learns of it at the end."""
    both = pair("process_vm", policy="recompute")
    params = both.offer("a", PROMPT)
    moved = both.decode.workers[0]._engine
    read = moved.read

    def slow(*args):
        both.prefill.side._ledger.drop_all("its time is up")
        both.prefill.side.sweep()
        both.prefill.ranks[0].memory[:] = 12345
        return read(*args)

    monkeypatch.setattr(moved, "read", slow)
    both.decode.ask("a", PROMPT, 3, params=params)
    assert both.decode.answers["a"].tokens == expected_output(PROMPT, 3)
    both.assert_clean()


def test_a_reset_of_prefill_withdraws_what_is_offered(pair):
    both = pair("process_vm", policy="recompute")
    params = both.offer("a", PROMPT)
    assert both.prefill.scheduler.reset_prefix_cache(reset_connector=True)
    both.decode.ask("a", PROMPT, 3, params=params)
    assert both.decode.answers["a"].tokens == expected_output(PROMPT, 3)
    both.assert_clean()


@engines
def test_metrics_tell_offers_and_pulls(pair, engine):
    both = pair(engine, policy="recompute")
    offered, pulled = both.prefill.count_metrics(), both.decode.count_metrics()
    both.hand_over("a", PROMPT)
    both.decode.ask("other", [1, *PROMPT[1:]], 1, params=both.offer("b", PROMPT[::-1]))
    both.offer("c", PROMPT[:40])
    both.decode.until(lambda: len(both.prefill.side._ledger) == 1)  # decode has said that it failed
    both.prefill.side._ledger.drop_all("end of test")
    both.prefill.ask("d", PROMPT[:20])
    both.assert_clean()
    assert (offered["offers"], offered["unread_offers/reason=released"], offered["unread_offers/reason=lost"]) == (3, 1, 1)
    assert (pulled["pulls/reason=ok"], pulled["pulls/reason=failed"]) == (1, 1)
    assert pulled["pulled_bytes"] == 7 * 2 * 2 * 16 * 32
    assert {split_name(name.removeprefix("gauge:"))[0] for name in [*offered, *pulled]} <= set(TRANSFER_METRICS)


def test_the_ledger_bounds_what_it_remembers(pair, monkeypatch):
    monkeypatch.setattr(ledgers, "REMEMBERED", 4)
    both = pair()
    for i in range(8):
        both.hand_over(f"r{i}", [*PROMPT[:20], i], 1)
    both.assert_clean()
    assert len(both.prefill.side._ledger._closed) == 4
