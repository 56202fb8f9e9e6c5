"""Every worked example and every rule of sizes in the KV pool guide; each test names its section."""

from __future__ import annotations

import re

import pytest
from tests.unit.ops.sizing_models import DEEPSEEK_V32, GIB, QWEN3_32B, fix, problems, sized, warnings


def test_2_2_1_a_segment_is_aligned_to_a_gigabyte():
    assert "--dram-size" in problems(report := sized(QWEN3_32B, dram_size=3 * GIB // 2, fabric=True))
    assert fix(report, "--dram-size") == "set 2GB"
    assert "--dram-size" not in problems(sized(QWEN3_32B, dram_size=GIB, fabric=True))


@pytest.mark.parametrize("devices", [1, 8, 16])
def test_2_4_2_connections_of_a_full_mesh_take_4_mb_each_and_warm_up_asks_thrice_per_device(devices):
    report = sized(QWEN3_32B, dp=devices)
    assert report.value("connection_bytes_per_device") == (devices - 1) * 4 * 1024 * 1024
    assert 2 * devices <= report.value("warmup_requests") == 3 * devices


def test_2_5_2_a_disk_of_800_gb_for_8_ranks_is_100_gb_each():
    assert sized(QWEN3_32B, tp=8, disk_size=800 * GIB).value("ssd_per_rank") == 100 * 1024 * 1024 * 1024


def test_2_5_2_sixteen_ranks_show_32_tb_by_default():
    report = sized(QWEN3_32B, tp=8, dp=2, disk_size=1024 * GIB)
    assert report.value("ssd_shown_by_default") == 32 * 1024 * GIB
    assert report.value("ssd_per_rank") == 64 * GIB


def test_3_3_on_a3_640_gb_are_40_gb_for_each_of_16_dies():
    assert sized(QWEN3_32B, pool_size=640 * GIB, dies=16).value("dram_per_die") == 40 * GIB
    assert sized(QWEN3_32B, pool_size=640 * GIB + 1, dies=16).value("dram_per_die") == 41 * GIB
    assert sized(QWEN3_32B, pool_size=640 * GIB, dies=16, nodes=2, ranks=32).value("dram_per_die") == 20 * GIB


def test_3_3_world_size_counts_services_to_come():
    assert sized(QWEN3_32B, tp=8, dp=2, spare=240, world_size=256).value("world_size") == 256
    report = sized(QWEN3_32B, tp=8, dp=2, spare=241, world_size=256)
    assert problems(report) == ["--world-size"]
    assert fix(report, "--world-size") == "set at least 257"


@pytest.mark.parametrize(("planned", "works"), [(4, False), (5, True), (10, True), (3072, True)])
def test_3_3_ubs_io_needs_5_gb_per_process(planned, works):
    report = sized(QWEN3_32B, ubsio_memory=4000 * GIB, ubsio_size=planned)
    assert ("--ubsio-size" not in problems(report)) is works


def test_3_3_all_of_ubs_io_fits_into_the_node():
    assert problems(sized(QWEN3_32B, tp=8, ubsio_memory=80 * GIB, ubsio_size=10)) == []
    report = sized(QWEN3_32B, tp=8, ubsio_memory=79 * GIB, ubsio_size=10)
    assert report.value("ubsio_total") == 80
    assert problems(report) == ["--ubsio-size"]
    assert fix(report, "--ubsio-size") == "set at most 9"


def test_3_7_a_standalone_process_gives_600_gb_and_the_ranks_nothing():
    report = sized(QWEN3_32B, tp=8, separated=True, pool_size=600 * GIB)
    assert report.value("dram_per_rank") == 600 * GIB
    assert report.value("world_size") == 9
    assert problems(sized(QWEN3_32B, separated=True, dram_size=1024 * GIB)) == []
    assert problems(sized(QWEN3_32B, separated=True, dram_size=1025 * GIB)) == ["--dram-size"]


def test_3_8_2_a_separated_node_has_one_service_with_50_gb():
    report = sized(QWEN3_32B, tp=8, separated=True, ubsio_memory=200 * GIB)
    assert (report.value("ubsio_size"), report.value("ubsio_device_count")) == (50, 1)


def test_3_8_3_of_200_gb_four_services_take_50_gb_each_at_most_and_10_is_valid():
    report = sized(QWEN3_32B, tp=4, ubsio_memory=200 * GIB, ubsio_size=10)
    assert report.value("ubsio_most") == 50
    assert report.value("ubsio_size") == 10
    assert problems(report) == []
    assert "--ubsio-size" in problems(sized(QWEN3_32B, tp=4, ubsio_memory=200 * GIB, ubsio_size=51))


def test_3_8_3_it_is_rounded_down_and_capped_at_3072():
    assert sized(QWEN3_32B, tp=4, ubsio_memory=203 * GIB).value("ubsio_most") == 50
    assert sized(QWEN3_32B, ubsio_memory=4000 * GIB).value("ubsio_most") == 3072


def test_3_8_3_below_5_gb_free_memory_or_run_fewer_services():
    report = sized(QWEN3_32B, tp=4, ubsio_memory=19 * GIB)
    assert report.value("ubsio_most") == 4
    assert problems(report) == ["--ubsio-memory"]
    assert fix(report, "--ubsio-memory") == "free memory (20 GB are needed), or run fewer local services"


@pytest.mark.parametrize("mb", [4096, 40960])
def test_4_3_shared_memory_of_40960_mb_is_20480_huge_pages(mb):
    report = sized(QWEN3_32B, tokens=128, shared_memory_mb=mb, huge_pages=mb // 2)
    assert report.value("huge_pages") == {4096: 2048, 40960: 20480}[mb]
    assert problems(report) == []
    assert problems(sized(QWEN3_32B, tokens=128, shared_memory_mb=mb, huge_pages=mb // 2 - 1)) == ["--huge-pages"]


def test_4_3_a_worker_holds_its_nodes_part_of_the_pool():
    report = sized(QWEN3_32B, pool_size=80 * GIB, nodes=2, ranks=2, shared_memory_mb=40959)
    assert report.value("shared_memory_size_mb") == 40960
    assert "--shared-memory-mb" in problems(report)


def test_5_3_1_what_eviction_leaves_holds_one_batch():
    batch = {"backend": "mooncake", "dram_size": 10 * GIB, "eviction_high_watermark": 0.9, "eviction_ratio": 0.1, "tokens": 8192}
    report = sized(QWEN3_32B, **batch, max_batched_tokens=4096)  # 256 KiB a token: 1 GiB a batch
    assert report.value("batch_bytes") == report.value("eviction_headroom") == GIB
    assert report.value("headroom_after_eviction") == int(1.9 * GIB)
    assert report.findings == []
    assert warnings(sized(QWEN3_32B, **batch, max_batched_tokens=4097)) == ["--eviction-high-watermark"]
    assert problems(sized(QWEN3_32B, **batch, max_batched_tokens=7783)) == ["--eviction-ratio"]
    assert problems(sized(QWEN3_32B, **batch, max_batched_tokens=7782)) == []


@pytest.mark.parametrize(("nbytes", "aligned"), [(1280 << 20, 2), (512 << 20, 1), (3 * GIB // 2, 2)])
def test_5_3_2_2_misaligned_buffers_are_refused_with_fabric_memory(nbytes, aligned):
    report = sized(QWEN3_32B, tokens=128, fabric=True, offload_buffer=nbytes)
    assert problems(report) == ["--offload-buffer"]
    assert fix(report, "--offload-buffer") == f"set MOONCAKE_OFFLOAD_LOCAL_BUFFER_SIZE_BYTES={aligned * GIB}"
    assert problems(sized(QWEN3_32B, tokens=128, offload_buffer=nbytes)) == []


def test_5_3_2_2_a_segment_of_20_gb_and_a_buffer_of_1_gb_need_a_capacity_of_22():
    sizes = {"dram_size": 20 * GIB, "offload_buffer": GIB, "fabric": True, "tp": 8}
    assert sized(QWEN3_32B, **sizes).value("fabric_max_capacity") == 22
    assert problems(sized(QWEN3_32B, **sizes, fabric_capacity=32)) == []
    report = sized(QWEN3_32B, **sizes, fabric_capacity=20)
    assert problems(report) == ["--fabric-capacity"]
    assert fix(report, "--fabric-capacity").startswith("set 22")


def test_5_3_2_2_the_local_buffer_is_not_used_with_fabric_memory():
    sizes = {"dram_size": 20 * GIB, "offload_buffer": GIB, "tp": 8}
    assert sized(QWEN3_32B, **sizes, fabric=True).value("host_memory_mooncake") == 8 * 21 * GIB


def test_5_3_2_3_the_buffer_stays_below_the_kv_memory_of_a_worker():
    sizes = {"tp": 8, "offload_buffer": 10737418240}  # 10 GB
    assert problems(sized(QWEN3_32B, **sizes, kv_memory=10 * GIB)) == []
    assert problems(sized(QWEN3_32B, **sizes, kv_memory=10 * GIB - 1)) == ["--offload-buffer"]


def test_5_3_2_3_the_buffer_does_not_depend_on_the_batch():
    values = {sized(QWEN3_32B, disk_size=GIB, block_size=4096, max_batched_tokens=n).value("offload_buffer") for n in (1024, 16384)}
    assert values == {5 * GIB}  # objects of 1 GiB


def test_5_3_2_3_a_buffer_that_single_objects_overflow_does_not_work():
    """kvpool splits loads, so that four objects fit at one time into 90 % of the buffer; the guide's connector does not."""
    sizes = {"tp": 8, "block_size": 8192}  # 32 KiB a token on a rank: objects of 256 MiB
    report = sized(QWEN3_32B, **sizes, offload_buffer=1100 << 20)
    assert problems(report) == ["--offload-buffer"]
    assert report.value("offload_buffer") == 2 * GIB
    assert fix(report, "--offload-buffer").endswith(f"={2 * GIB}")
    assert problems(sized(QWEN3_32B, **sizes, offload_buffer=1280 << 20)) == []
    needed = -(-(4 * 256 << 20) * 10 // 9)
    assert problems(sized(QWEN3_32B, **sizes, offload_buffer=needed)) == []
    assert problems(sized(QWEN3_32B, **sizes, offload_buffer=needed - 1)) == ["--offload-buffer"]


def test_a_planned_size_need_not_be_rounded_up():
    planned = {"pool_size": 7 * GIB, "ranks": 2}
    assert problems(sized(QWEN3_32B, **planned, dram_size=7 * GIB // 2)) == []
    assert problems(sized(QWEN3_32B, **planned, dram_size=7 * GIB // 2 - 1)) == ["--dram-size"]


def test_sizes_of_nothing_are_judged_too():
    assert problems(sized(QWEN3_32B, dram_size=0)) == ["--dram-size"]
    assert problems(sized(QWEN3_32B, offload_buffer=0)) == ["--offload-buffer"]


def test_5_3_2_3_host_memory_is_tp_times_segment_and_both_buffers():
    sizes = {"backend": "mooncake", "tp": 8, "dram_size": 20 * GIB, "offload_buffer": 2 * GIB, "local_buffer": GIB}
    assert sized(QWEN3_32B, **sizes).value("host_memory_mooncake") == 8 * (20 + 2 + 1) * GIB
    assert problems(sized(QWEN3_32B, **sizes, host_memory=184 * GIB)) == []
    report = sized(QWEN3_32B, **sizes, host_memory=184 * GIB - 1)
    assert problems(report) == ["--host-memory"]
    assert fix(report, "--host-memory").endswith(f"as it is: {184 * GIB} bytes (184.00 GiB)")
    assert f"give at most {20 * GIB - 1} bytes each" in fix(report, "--host-memory")
    assert problems(sized(DEEPSEEK_V32, **sizes, nodes=2, host_memory=92 * GIB)) == []


@pytest.mark.parametrize("backend", ["local", "mooncake"])
@pytest.mark.parametrize("given", [1, GIB, 8 * GIB, 15 * GIB])
def test_a_host_that_is_too_small_is_told_the_smallest_that_works(backend, given):
    """And never to give nothing."""
    plan = {"backend": backend, "tp": 8, "dram_size": 2 * GIB}
    report = sized(QWEN3_32B, **plan, host_memory=given)
    words = fix(report, "--host-memory")
    assert "at most 0 bytes" not in words
    least = int(re.search(r"as it is: (\d+) bytes", words)[1])
    assert "--host-memory" not in problems(sized(QWEN3_32B, **plan, host_memory=least))
    assert "--host-memory" in problems(sized(QWEN3_32B, **plan, host_memory=least - 1))
