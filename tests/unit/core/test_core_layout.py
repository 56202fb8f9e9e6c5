"""Layouts against numpy: the addresses of a block's pages are where the array says they are."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.core.keys import Shard
from kvpool.core.layout import BlockLayout, PageRun, page_geometry

SHARD = Shard(0, 0, (0, 1))


def page(layer: int, nbytes: int = 8, base: int = 1000, stride: int = 64, name: str = "k") -> PageRun:
    return PageRun(layer, name, base, stride, nbytes)


@given(st.lists(st.tuples(st.integers(0, 10**12), st.integers(1, 10**6), st.integers(1, 10**6)), min_size=1, max_size=6),
       st.lists(st.integers(0, 10**6), max_size=8))  # fmt: skip
def test_addresses_are_base_plus_block_times_stride(runs, ids):
    pages = tuple(PageRun(i, "k", base, stride, nbytes) for i, (base, stride, nbytes) in enumerate(runs))
    layout = BlockLayout(0, SHARD, pages)
    found = layout.addresses(ids)
    assert found.shape == (len(ids), len(pages))
    assert found.dtype == np.int64
    assert found.tolist() == [[p.base + b * p.stride for p in pages] for b in ids]


@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=8))
def test_offsets_and_sizes_tile_the_object(sizes):
    layout = BlockLayout(0, SHARD, tuple(page(i, nbytes) for i, nbytes in enumerate(sizes)))
    assert layout.sizes.tolist() == sizes
    assert layout.object_nbytes == sum(sizes)
    assert list(layout.offsets) == [sum(sizes[:i]) for i in range(len(sizes))]


def test_pages_out_of_order_are_refused():
    with pytest.raises(ValueError, match="sorted"):
        BlockLayout(0, SHARD, (page(1), page(0)))
    with pytest.raises(ValueError, match="sorted"):
        BlockLayout(0, SHARD, (page(0, name="v"), page(0, name="k")))


def test_bc_035_a_draft_layer_is_a_page_like_any_other():
    layout = BlockLayout(0, Shard(0, 0, tuple(range(48))), tuple(page(i) for i in range(48)))
    assert layout.addresses([5]).shape == (1, 48)


@given(st.permutations([0, 1, 2]), st.integers(1, 5), st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.integers(0, 6))
def test_a_dense_block_in_any_axis_order_is_one_run(order, blocks, heads, tokens, width, gap):
    inner = [heads, tokens, width]
    size = heads * tokens * width
    buffer = np.zeros((blocks, size + gap), dtype=np.int32)
    shuffled = buffer[:, :size].reshape([blocks, *(inner[i] for i in order)])
    array = shuffled.transpose([0, *(1 + order.index(i) for i in range(3))])
    assert array.shape == (blocks, heads, tokens, width)
    stride, nbytes = page_geometry(array.shape, [s // 4 for s in array.strides], 4, blocks)
    assert nbytes == size * 4
    start = array.__array_interface__["data"][0]
    for block in range(blocks):
        array[block] = block + 1
        run = (np.ctypeslib.as_array((np.ctypeslib.ctypes.c_int32 * size).from_address(start + block * stride))).tolist()
        assert run == [block + 1] * size, "the run is exactly the bytes of the block"


def test_a_block_that_is_not_dense_is_refused():
    array = np.zeros((4, 2, 8, 16), dtype=np.float32)[:, :, :4]
    with pytest.raises(ValueError, match="dense"):
        page_geometry(array.shape, [s // 4 for s in array.strides], 4, 4)


def test_planes_of_keys_and_values_are_refused():
    array = np.zeros((2, 4, 8), dtype=np.float32).transpose(1, 0, 2)  # [block, k or v, ...], the planes far apart
    with pytest.raises(ValueError, match="dense"):
        page_geometry(array.shape, [s // 4 for s in array.strides], 4, 4)


def test_blocks_made_of_adjoining_parts_are_whole():
    array = np.zeros((12, 4, 2), dtype=np.float32)
    assert page_geometry(array.shape, [s // 4 for s in array.strides], 4, 4) == (3 * 32, 3 * 32)


def test_parts_that_do_not_adjoin_are_refused():
    array = np.zeros((12, 8, 2), dtype=np.float32)[:, :4]
    with pytest.raises(ValueError, match="adjoin"):
        page_geometry(array.shape, [s // 4 for s in array.strides], 4, 4)


def test_a_cache_that_does_not_hold_the_blocks_evenly_is_refused():
    with pytest.raises(ValueError, match="evenly"):
        page_geometry((10, 4), (4, 1), 4, 4)


def test_bc_025_a_latent_page_has_the_bytes_of_its_tokens():
    array = np.zeros((7, 1, 16, 576), dtype=np.uint16)
    assert page_geometry(array.shape, [s // 2 for s in array.strides], 2, 7) == (16 * 576 * 2, 16 * 576 * 2)
