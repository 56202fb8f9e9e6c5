"""Every worked example and every rule of sizes in the layerwise and sparse offloading guide; each test names its section."""

from __future__ import annotations

import pytest
from tests.unit.ops.sizing_models import DEEPSEEK_V32, GIB, QWEN3_32B, fix, problems, sized, warnings


def test_1_dram_size_is_the_workloads_kv_by_ranks_in_whole_gib():
    # 61 x 576 x 2 + 61 x 132 bytes a token; 10 sequences of 32,768 tokens: 23.9 GB
    total = (61 * 1152 + 61 * 132) * 32768 * 10
    report = sized(DEEPSEEK_V32, tokens=32768, concurrency=10, tp=8)
    assert report.value("kv_bytes_total") == total
    assert report.value("dram_per_rank") == -(-total // 8 // GIB) * GIB == 3 * GIB
    assert sized(DEEPSEEK_V32, tokens=32768, concurrency=10, tp=8, dram_size=10 * GIB).ok
    report = sized(DEEPSEEK_V32, tokens=32768, concurrency=40, tp=8, dram_size=10 * GIB)
    assert problems(report) == ["--dram-size"]
    assert fix(report, "--dram-size") == "give 12GB each, or more of them"


def test_2_three_buffers_beside_layer_0():
    report = sized(DEEPSEEK_V32, layerwise_buffers=3, layerwise_independent=(0,))
    assert report.value("layerwise_footprint") == (1 + 3) / 61
    assert report.value("layerwise_capacity_factor") == 61 / 4
    assert report.value("layerwise_device_bytes") == -(-61 * (1152 + 132) * 4096 * 4 // 61)


@pytest.mark.parametrize(
    ("buffers", "independent", "kept"),
    [
        (2, (), 2),
        (4, (0, 60), 6),
        (4, (0, -1), 6),
        (4, (0, -61), 5),
        (3, "all", 61),
        (60, (0,), 61),
        (1000, (0,), 61),
        (59, (0,), 60),
    ],
)
def test_2_footprint_is_independent_layers_and_the_buffers_that_the_others_can_use(buffers, independent, kept):
    report = sized(DEEPSEEK_V32, layerwise_buffers=buffers, layerwise_independent=independent)
    assert report.value("layerwise_footprint") == kept / 61
    assert warnings(report).count("--layerwise-buffers") == (kept == 61)


def test_2_buffers_are_for_latent_caches():
    assert "--layerwise-buffers" in problems(sized(QWEN3_32B, layerwise_buffers=3))
    assert problems(sized(DEEPSEEK_V32, layerwise_buffers=3)) == []


def test_3_a_hot_buffer_of_4096_rows_is_twice_index_topk():
    report = sized(DEEPSEEK_V32, topk_buffer=4096, max_num_seqs=64)
    assert report.ok
    assert report.value("hot_buffer_bytes") == 61 * 64 * 4096 * 1152
    assert report.value("hot_buffer_bytes") // 61 == 301989888  # 302 MB a layer
    assert report.value("device_bytes_per_token") == 61 * 132


@pytest.mark.parametrize(
    ("rows", "block_size", "works"),
    [(2048, 128, True), (2047, 128, False), (1024, 128, False), (4100, 128, False), (4096, 64, True), (4224, 256, False)],
)
def test_3_the_hot_buffer_holds_index_topk_in_whole_blocks(rows, block_size, works):
    report = sized(DEEPSEEK_V32, topk_buffer=rows, block_size=block_size)
    assert problems(report) == ([] if works else ["--topk-buffer"])
    if not works:
        assert fix(report, "--topk-buffer") == "set 4096"


def test_3_the_host_pool_holds_the_full_cache_of_a_dp_rank():
    token = 61 * 1152
    tokens = 128 * GIB // token // 128 * 128
    report = sized(DEEPSEEK_V32, tokens=tokens, topk_buffer=4096, dram_per_dp=128, dram_size=600 * GIB, tp=8)
    assert report.value("host_pool_bytes") == tokens * token <= 128 * GIB
    assert report.value("dram_size_per_dp_GB") == 128
    assert problems(report) == []
    report = sized(DEEPSEEK_V32, tokens=tokens + 128, topk_buffer=4096, dram_per_dp=128, dram_size=600 * GIB, tp=8)
    assert problems(report) == ["--dram-per-dp"]
    assert "129" in fix(report, "--dram-per-dp")


def test_3_tp_ranks_share_the_host_pool_and_dp_ranks_share_the_sequences():
    one = sized(DEEPSEEK_V32, concurrency=8, topk_buffer=4096)
    assert sized(DEEPSEEK_V32, concurrency=8, topk_buffer=4096, tp=8).value("host_pool_bytes") == one.value("host_pool_bytes")
    assert sized(DEEPSEEK_V32, concurrency=8, topk_buffer=4096, dp=4).value("host_pool_bytes") == one.value("host_pool_bytes") / 4


def test_3_consecutive_ports_are_dp_times_tp():
    assert sized(DEEPSEEK_V32, topk_buffer=4096, dp=4, tp=8).value("remote_d2h_ports") == 32


@pytest.mark.parametrize("plan", [{"pp": 2}, {"kv_dtype": "fp8_ds_mla"}])
def test_5_sparse_offload_has_neither_pipelines_nor_other_data_types(plan):
    assert "--topk-buffer" in problems(sized(DEEPSEEK_V32, topk_buffer=4096, **plan))


def test_5_sparse_offload_needs_a_sparse_model():
    assert "--topk-buffer" in problems(sized(QWEN3_32B, topk_buffer=4096))
