"""Keys and shards: injective, of few characters, short, and the same on every path."""

from __future__ import annotations

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.core.keys import Shard, block_key, block_keys, fit_key, group_hashes, key_prefix, namespace_prefix

SAFE = frozenset(string.ascii_letters + string.digits + ":_-")
HASHES = st.binary(min_size=32, max_size=32)
NAMESPACES = st.text("0123456789abcdef", min_size=16, max_size=16)


@st.composite
def shards(draw) -> Shard:
    first = draw(st.integers(0, 300))
    last = first + draw(st.integers(0, 40))
    layers = draw(st.sets(st.integers(0, 200), min_size=1, max_size=12))
    return Shard(first, last, tuple(sorted(layers)), draw(st.integers(0, 9)), draw(st.integers(0, 9)))


def key_of(namespace: str, group: int, shard: Shard, block_hash: bytes) -> bytes:
    return block_key(key_prefix(namespace, group, shard), block_hash)


@given(NAMESPACES, st.integers(0, 99), shards(), HASHES)
def test_bc_012_bc_013_a_key_is_short_and_of_characters_that_every_store_takes(namespace, group, shard, block_hash):
    key = key_of(namespace, group, shard, block_hash).decode()
    assert set(key) <= SAFE
    assert len(key) < 255
    assert key.startswith(namespace_prefix(namespace).decode())


Parts = st.tuples(NAMESPACES, st.integers(0, 20), shards(), HASHES)


@given(Parts, Parts)
def test_distinct_contents_have_distinct_keys(one, other):
    assert (key_of(*one) == key_of(*other)) == (one == other)


@given(st.sets(st.integers(0, 30), min_size=1), st.sets(st.integers(0, 30), min_size=1))
def test_distinct_layer_sets_have_distinct_shards(one, other):
    texts = [str(Shard(0, 0, tuple(sorted(layers)))) for layers in (one, other)]
    assert (texts[0] == texts[1]) == (one == other)


def test_layer_spans_read_well():
    assert str(Shard(0, 3, tuple(range(12)))) == "h0-3_l0-11_c0_0"
    assert str(Shard(2, 2, (7,), 1, 2)) == "h2-2_l7-7_c1_2"
    assert str(Shard(0, 0, (0, 2, 4, 6))) == "h0-0_l0-6s2_c0_0"
    irregular = str(Shard(0, 0, (0, 1, 3)))
    assert irregular.startswith("h0-0_l0-3x")
    assert irregular != str(Shard(0, 0, (0, 2, 3)))


@given(HASHES)
def test_bc_010_the_key_depends_on_the_bytes_of_a_hash_not_on_their_type(block_hash):
    prefix = key_prefix("n", 0, "h0-0_l0-0_c0_0")
    expected = prefix + block_hash.hex().encode()
    for form in (block_hash, bytearray(block_hash), memoryview(block_hash)):
        assert block_key(prefix, form) == expected
        assert block_keys(prefix, [form]) == [expected]


@given(st.lists(HASHES, max_size=40), st.integers(1, 8), st.integers(0, 12), st.integers(0, 12))
def test_bc_010_a_group_block_is_named_by_its_last_hash_unit(hashes, units, first, last):
    found = group_hashes(hashes, units, first, last)
    blocks = range(first, min(last, len(hashes) // units))
    assert found == [hashes[block * units + units - 1] for block in blocks]


@given(st.lists(HASHES, max_size=40), st.integers(1, 4), st.integers(0, 20))
def test_group_hashes_of_a_range_are_those_of_its_blocks(hashes, units, last):
    joined = [h for i in range(last) for h in group_hashes(hashes, units, i, i + 1)]
    assert group_hashes(hashes, units, 0, last) == joined


TEXTS = st.text(st.sampled_from("ab:/ -_Ω汉😀"), min_size=1, max_size=120)


@given(TEXTS, TEXTS, st.integers(40, 90))
def test_bc_013_fit_key_keeps_distinct_keys_distinct(one, other, max_len):
    fitted = [fit_key(text, SAFE, max_len) for text in (one, other)]
    assert (fitted[0] == fitted[1]) == (one == other)
    for before, after in zip((one, other), fitted, strict=True):
        assert len(after) <= max_len
        assert SAFE.issuperset(after)
        if SAFE.issuperset(before) and len(before) <= max_len:
            assert after == before


@pytest.mark.parametrize("length", [255, 1024, 1025, 5000])
def test_bc_013_long_keys_are_cut_to_the_limit_and_no_earlier(length):
    key = "k" * length
    fitted = fit_key(key, SAFE, 1024)
    assert (fitted == key) == (length <= 1024)
    assert len(fitted) == min(length, 1024)


def test_bc_013_keys_that_differ_behind_the_cut_stay_distinct():
    one, other = "k" * 1900 + "a" * 100, "k" * 1900 + "b" * 100
    assert fit_key(one, SAFE, 1024) != fit_key(other, SAFE, 1024)


@given(TEXTS, st.integers(40, 90))
def test_bc_013_a_key_that_looks_like_a_rewritten_one_is_not_taken_for_it(text, max_len):
    fitted = fit_key(text + "/", SAFE, max_len)
    assert fit_key(fitted, SAFE, max_len) != fitted
    assert len(fit_key(fitted, SAFE, max_len)) <= max_len


def test_fit_key_refuses_a_limit_without_room_for_the_digest():
    with pytest.raises(ValueError, match="too short"):
        fit_key("k" * 100, SAFE, 39)
