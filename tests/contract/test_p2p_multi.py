"""MooncakeConnectorV1 and AscendStoreConnector as children of one MultiConnector, as the guides have it."""

from __future__ import annotations

import pytest

from tests.contract.content import expected_output
from tests.contract.pair import Half, make_pair
from tests.contract.realpool import RealPool

PROMPT = list(range(100, 200))
orders = pytest.mark.parametrize("beside", ["first", "last"])


@pytest.fixture
def pool(pool_root):
    (pool_root / "pool").mkdir()
    made = RealPool(pool_root / "pool")
    yield made
    made.close()


@pytest.fixture
def pair(pool, pool_root, monkeypatch):
    """Both engines with both connectors and one pool."""
    monkeypatch.setenv("KVPOOL_SECRET", "a secret of tests")
    monkeypatch.setenv("ASCEND_TRANSFER_TIMEOUT", "8000")
    halves: list[Half] = []

    def start(spec, store):
        halves.append(Half(spec, store))
        return halves[-1]

    def make(beside, engine="local_host", consumer=None, prefill=None, **common):
        decode = {"options": {**pool.options, **(consumer or {})}}
        prefill = {"options": pool.options, **(prefill or {})}
        (pool_root / "moves").mkdir(exist_ok=True)
        return make_pair(pool_root / "moves", start, engine, prefill, decode, store=pool, beside=beside, num_blocks=128, **common)

    yield make
    for half in halves:
        half.close()


@orders
@pytest.mark.parametrize("engine", ["local_host", "process_vm"])
def test_bc_178_bc_182_decode_receives_prefill_saves_and_both_let_go(pair, pool, beside, engine):
    both = pair(beside, engine)
    assert both.hand_over("a", PROMPT) == expected_output(PROMPT, 3)
    assert both.decode.external["a"] == 99
    both.assert_clean()
    assert len(pool.objects) == 6
    both.prefill.forget_local()
    longer = [*PROMPT, 1, 2, 3]
    both.decode.forget_local()
    assert both.hand_over("b", longer) == expected_output(longer, 3)
    assert both.prefill.external["b"] == 96, "prefill loads from the pool"
    assert both.decode.external["b"] == 102, "decode receives all of it"
    both.assert_clean()


@orders
def test_the_second_turn_of_prefill_is_served_by_what_decode_has_stored(pair, beside):
    both = pair(beside, consumer={"consumer_is_to_put": True})
    answer = both.hand_over("turn1", PROMPT, 60)
    assert answer == expected_output(PROMPT, 60)
    both.decode.settle()
    both.prefill.settle()
    second = [*PROMPT, *answer, 5, 6, 7]
    both.prefill.forget_local()
    both.decode.forget_local()
    assert both.hand_over("turn2", second, 2) == expected_output(second, 2)
    assert both.prefill.external["turn2"] == (len(PROMPT) + 59) // 16 * 16
    both.assert_clean()


@pytest.mark.parametrize(
    ("prefill", "told", "heads", "served"),
    [
        ({"tp": 2}, {"prefill_tp_size": 2}, 4, True),
        ({"tp": 4}, {"prefill_tp_size": 4, "decode_tp_size": 1}, 2, True),
        ({"pp": 2}, {"prefill_pp_size": 2}, 2, True),
        ({"tp": 2, "pp": 2}, {"prefill_tp_size": 2, "prefill_pp_layer_partition": "1,1"}, 2, True),
        ({"tp": 2, "pp": 2}, {"prefill_pp_size": 2}, 1, True),
        ({"tp": 2}, {}, 2, False),
        ({"tp": 2}, {"prefill_tp_size": 3}, 4, False),
        ({"pp": 2}, {}, 2, False),
        ({"tp": 2, "pp": 2}, {"prefill_tp_size": 2}, 2, False),
    ],
    ids=str,
)
def test_bc_016_what_decode_stores_fits_prefill_of_other_sizes_or_is_not_found(pair, prefill, told, heads, served, caplog):
    both = pair("last", consumer={"consumer_is_to_put": True, "consumer_is_to_load": True, **told}, prefill=prefill, heads=heads)
    answer = both.hand_over("turn1", PROMPT, 60)
    for half in (both.decode, both.prefill):
        half.settle()
        half.forget_local()
    second = [*PROMPT, *answer, 5, 6, 7]
    assert both.hand_over("turn2", second, 2) == expected_output(second, 2)
    assert both.prefill.external["turn2"] == (144 if served else 96)
    assert ("cannot be cut for prefill_tp_size=3" in caplog.text) == (told.get("prefill_tp_size") == 3)
    both.decode.forget_local()
    both.decode.ask("from the pool", second, 2)
    assert both.decode.external["from the pool"] == (160 if served else 0)
    both.assert_clean()


@orders
def test_bc_179_each_child_reports_only_its_own_requests(pair, beside):
    """With consumer_is_to_load the first child that has something wins; the other never says a word of the request."""
    both = pair(beside, consumer={"consumer_is_to_load": True})
    both.prefill.ask("warm", PROMPT)
    both.prefill.settle()
    told = {"pull": [], "pool": []}
    for rank in both.decode.ranks:
        worker, side = both.decode.workers[0], rank.worker_side
        take, loads = worker.take_finished, side.take_finished_loads
        worker.take_finished = lambda take=take: told["pull"].append(found := take()) or found
        side.take_finished_loads = lambda wait, take=loads: told["pool"].append(found := take(wait)) or found
    assert both.hand_over("a", PROMPT) == expected_output(PROMPT, 3)
    done = {name: [d for d, _ in found if d] for name, found in told.items()}
    if beside == "first":
        assert both.decode.external["a"] == 96
        assert not done["pull"]
    else:
        assert both.decode.external["a"] == 99
        assert not done["pool"]
    both.assert_clean()  # where the pool won, prefill was told that nobody will read the offer


@orders
def test_aborts_while_both_are_at_it(pair, beside):
    both = pair(beside, "process_vm")
    for i in range(6):
        prompt = [*PROMPT[:60], i]
        params = both.offer(f"a{i}", prompt)
        both.decode.add(f"a{i}", prompt, 3, params=params)
        if i % 2:
            both.decode.step()
        both.decode.abort(f"a{i}")
    both.assert_clean()


def test_peers_with_different_pools_are_told(pair, caplog, monkeypatch):
    import logging

    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    both = pair("last", consumer={"local_pool_name": "another"})
    assert both.hand_over("a", PROMPT) == expected_output(PROMPT, 3)
    assert "pool address" in caplog.text
