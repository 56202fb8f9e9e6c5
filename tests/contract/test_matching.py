"""What is asked, how much is reported as a hit, and what becomes of leases."""

from __future__ import annotations

import time

import pytest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

from tests.contract.content import expected_output
from tests.contract.fakestore import FakeStore

PROMPT = list(range(100, 200))


@pytest.mark.parametrize(("length", "calls"), [(1, 0), (15, 0), (16, 0), (17, 1)])
def test_bc_052_prompts_that_cannot_hit_do_not_ask(start, length, calls):
    """The last token is always computed, so 16 tokens have no block to load."""
    engine = start()
    asked = []
    engine.store.hooks["exists"] = asked.append
    engine.ask("a", PROMPT[:length])
    assert [len(keys) for keys in asked] == [1] * calls
    engine.assert_clean()


@pytest.mark.parametrize("load_async", [False, True])
@pytest.mark.parametrize("local", [0, 16])
@pytest.mark.parametrize("length", [16, 32, 33, 64])
def test_bc_066_a_full_prompt_hit_leaves_something_to_compute(start, length, local, load_async):
    store = FakeStore()
    first = start(store)
    first.ask("a", [*PROMPT[:length], 1])  # all full blocks of the prompt are stored
    first.settle()
    engine = start(store, load_async=load_async)
    if local:
        engine.ask("warm", PROMPT[:17])
        engine.settle()
    told = []
    match, allocated = engine.pool.matched_tokens, engine.pool.allocated
    engine.pool.matched_tokens = lambda request, computed: told.append(("match", answer := match(request, computed))) or answer
    engine.pool.allocated = lambda request, blocks, tokens: told.append(("alloc", tokens)) or allocated(request, blocks, tokens)
    assert engine.ask("b", PROMPT[:length], 3) == expected_output(PROMPT[:length], 3)
    most = (length - 1) // 16 * 16
    expected = most - min(local, most)
    hits = [answer for what, answer in told if what == "match"]
    assert hits[0] == (expected, load_async and expected > 0)
    assert next(tokens for what, tokens in told if what == "alloc") == expected
    engine.assert_clean()


def test_bc_053_the_second_callback_after_an_async_load_adds_no_job(start):
    engine = start(load_async=True)
    engine.ask("a", PROMPT)
    engine.forget_local()
    calls, allocated = [], engine.pool.allocated
    engine.pool.allocated = lambda r, b, tokens: (
        calls.append((tokens, [len(t) for t in b.get_block_ids()])) or allocated(r, b, tokens)
    )
    gets = engine.store.calls["get"]
    engine.ask("b", PROMPT, 3)
    assert [tokens for tokens, _ in calls] == [96, 0]
    assert engine.store.calls["get"] == gets + 1
    engine.assert_clean()


def test_bc_118_bc_115_the_metrics_count_what_a_hit_could_have_covered(start):
    engine = start(block_size=100, hash_block_size=100, max_tokens_per_step=2000)
    prompt = [i % 1900 for i in range(1000)]
    engine.ask("pool", prompt[:801])
    engine.forget_local()
    engine.ask("local", prompt[:601])
    engine.settle()
    counted = engine.count_metrics()
    engine.ask("b", prompt)
    assert engine.external["b"] == 200
    assert (counted["queried_tokens"], counted["hit_tokens"]) == (300, 200), "of 400 tokens, the last block is always computed"
    assert (counted["lookups"], counted["hits"]) == (1, 1)
    engine.assert_clean()


def test_bc_118_a_pool_that_knows_less_than_the_engine_counts_as_nothing(start):
    engine = start(max_tokens_per_step=1024)
    prompt = [i % 1900 for i in range(1000)]
    engine.ask("a", prompt[:705])
    engine.settle()
    names = {h.hex().encode() for h in engine.requests["a"].block_hashes[32:]}
    engine.store.evict([key for key in engine.store.objects if key.rsplit(b":", 1)[1] in names])
    counted = engine.count_metrics()
    engine.ask("b", prompt)
    assert engine.external["b"] == 0
    assert counted.get("hit_tokens", 0) == 0
    assert counted["misses/reason=absent"] == 1
    assert min(counted.values()) >= 0
    engine.assert_clean()


def test_bc_079_evicted_between_lookup_and_load(start):
    """A lease forbids it; where a store cannot lease, the load reports it."""
    for leases in (True, False):
        engine = start(FakeStore(leases=leases), policy="recompute")
        engine.ask("a", PROMPT)
        engine.forget_local()
        gone = []
        allocated = engine.pool.allocated

        def evict_first(request, blocks, tokens, engine=engine, gone=gone, allocated=allocated):
            gone.append(engine.store.evict(list(engine.store.objects)))
            allocated(request, blocks, tokens)

        engine.pool.allocated = evict_first
        assert engine.ask("b", PROMPT, 3) == expected_output(PROMPT, 3)
        assert gone[0] == (0 if leases else 6)
        engine.pool.allocated = allocated
        engine.assert_clean()


def test_bc_079_a_lease_lost_between_probe_and_lease_shortens_the_hit(start):
    engine = start()
    engine.ask("a", PROMPT)
    engine.forget_local()
    third = engine.requests["a"].block_hashes[2].hex().encode()

    def lose(keys):
        engine.store.hooks.pop("lease")
        engine.store.evict([key for key in engine.store.objects if key.endswith(third)])

    engine.store.hooks["lease"] = lose
    assert engine.ask("b", PROMPT, 2) == expected_output(PROMPT, 2)
    assert engine.external["b"] == 32
    engine.assert_clean()


@pytest.mark.parametrize("load_async", [False, True])
def test_bc_079_a_failed_allocation_keeps_one_lease_at_most(start, load_async):
    engine = start(num_blocks=16, load_async=load_async)
    engine.ask("a", PROMPT)
    engine.forget_local()
    engine.add("big", [7] * 150, 60)
    engine.step()
    engine.add("b", PROMPT, 3)
    for _ in range(20):
        engine.step()
        assert len(engine.store.leased) <= 1
    engine.run()
    engine.assert_clean()


def test_a_lease_that_is_about_to_end_is_taken_anew(start):
    engine = start(num_blocks=16, options={"lease_ms": 3000, "load_timeout_ms": 1000})
    engine.ask("a", PROMPT)
    engine.forget_local()
    engine.add("big", [7] * 150, 60)
    engine.step()
    engine.step()
    engine.step()
    engine.add("b", PROMPT, 3)
    engine.step()
    leases = engine.store.calls["lease"]
    engine.step()
    assert engine.store.calls["lease"] == leases, "asked again in vain, with the same lease"
    time.sleep(2.0)
    engine.step()
    assert engine.store.calls["lease"] == leases + 1
    assert len(engine.store.leased) == 1
    engine.run()
    engine.assert_clean()


def test_short_hits_are_not_worth_it(start):
    engine = start(options={"min_hit_tokens": 64})
    engine.ask("a", PROMPT)
    engine.forget_local()
    engine.ask("short", PROMPT[:50])
    engine.forget_local()
    engine.ask("long", PROMPT[:70])
    assert (engine.external["short"], engine.external["long"]) == (0, 64)
    engine.assert_clean()


def image(identifier: str, offset: int, length: int = 8) -> MultiModalFeatureSpec:
    return MultiModalFeatureSpec(None, "image", identifier, PlaceholderRange(offset, length), identifier)


def test_bc_042_adapters_never_share(start):
    engine = start(prefix_caching=False)
    prompt = PROMPT[:65]
    for lora in (None, "a", "b"):
        engine.ask(f"cold-{lora}", prompt, 2, lora=lora)
        assert engine.external[f"cold-{lora}"] == 0
        engine.settle()
    for lora in (None, "a", "b"):
        assert engine.ask(f"warm-{lora}", prompt, 2, lora=lora) == expected_output(prompt, 2, lora=lora)
        assert engine.external[f"warm-{lora}"] == 64
    engine.assert_clean()


def test_bc_046_salts_never_share_and_never_show(start, caplog):
    engine = start(prefix_caching=False)
    prompt = PROMPT[:65]
    for salt in (None, "s3cret-one", "s3cret-two"):
        engine.ask(f"cold-{salt}", prompt, salt=salt)
        assert engine.external[f"cold-{salt}"] == 0
        engine.settle()
    for salt in (None, "s3cret-one", "s3cret-two"):
        assert engine.ask(f"warm-{salt}", prompt, salt=salt) == expected_output(prompt, 1, salt=salt)
        assert engine.external[f"warm-{salt}"] == 64
    engine.ask("short", PROMPT[:5], salt="s3cret-one")
    assert engine.external["short"] == 0
    assert not [key for key in engine.store.objects if b"s3cret" in key]
    assert "s3cret" not in "".join(r.getMessage() for r in caplog.records if "kvpool" in r.name)
    engine.assert_clean()


def test_bc_044_images_share_what_stands_before_them_and_nothing_else(start):
    engine = start(prefix_caching=False, num_blocks=128)
    prompt = PROMPT[:65]  # the placeholder is in block 1
    for i in range(4):
        engine.ask(f"i{i}", prompt, images=[image(f"{i:032x}", 20)])
        engine.settle()
        assert engine.external[f"i{i}"] == (16 if i else 0)
    engine.ask("again", prompt, images=[image(f"{2:032x}", 20)])
    assert engine.external["again"] == 64
    engine.assert_clean()


def test_bc_044_two_thousand_images_have_two_thousand_keys(start):
    engine = start()
    seen = set()
    for i in range(2000):
        request = engine.request(f"i{i}", PROMPT[:33], images=[image(f"{i << 96:032x}", 20)])
        seen.add(bytes(request.block_hashes[1]))
    assert len(seen) == 2000


def test_a_request_that_may_not_read_the_cache_does_not_load(start):
    engine = start()
    engine.ask("a", PROMPT)
    engine.forget_local()
    request = engine.request("b", PROMPT)
    request.skip_reading_prefix_cache = True
    engine.scheduler.add_request(request)
    engine.run(["b"])
    assert engine.external["b"] == 0
    engine.assert_clean()


def test_bc_068_a_prompt_that_is_all_local_is_never_reported_as_received(start):
    """Whatever the client's kv_transfer_params claim: nobody trusts them, nothing is loaded, nothing is reported."""
    engine = start(load_async=True)
    engine.ask("a", PROMPT, 3)
    engine.settle()
    take, reported = engine.ranks[0].worker_side.take_finished_loads, []
    engine.ranks[0].worker_side.take_finished_loads = lambda wait: reported.append(found := take(wait)) or found
    gets = engine.store.calls["get"]
    request = engine.request("b", PROMPT, 3)
    request.kv_transfer_params = {
        "do_remote_prefill": True,
        "remote_block_ids": [[1, 2, 3]],
        "remote_engine_id": "x",
        "remote_port": -1,
    }
    engine.scheduler.add_request(request)
    engine.run(["b"])
    assert engine.answers["b"].tokens == expected_output(PROMPT, 3)
    assert engine.store.calls["get"] == gets
    assert reported
    assert not any(done or failed for done, failed in reported)
    engine.assert_clean()
