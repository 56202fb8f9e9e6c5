"""mmc-local.conf and mmc-meta.conf."""

from __future__ import annotations

import pytest
from tests.unit.options.mistake_cases import on

from kvpool.options import OptionError, load_ascend_store
from kvpool.options.memcache_conf import clean_conf, conf_kind, parse_conf, read_local_conf, read_meta_conf
from kvpool.options.memcache_rules import check_pair

L = "ock.mmc.local_service"
LOCAL = f"ock.mmc.meta_service_url = tcp://h:5000\n{L}.config_store_url = tcp://h:6000\n"
META = "ock.mmc.meta_service_url = tcp://h:5000\nock.mmc.meta_service.config_store_url = tcp://h:6000\n"


def local(*lines):
    return read_local_conf(LOCAL + "\n".join(lines), "mmc-local.conf")


def refused(*lines):
    with pytest.raises(OptionError) as caught:
        local(*lines)
    return str(caught.value)


def test_bc_150_a_process_may_give_nothing():
    options = local(f"{L}.dram.size = 0GB", f"{L}.max.dram.size = 1024GB").options
    assert (options.dram_size, options.max_dram_size) == (0, 1 << 40)


def test_bc_150_more_than_the_largest_is_refused():
    assert "is larger than max.dram.size" in refused(f"{L}.dram.size = 2GB", f"{L}.max.dram.size = 1GB")


def test_bc_150_sizes_are_optional_and_without_unit_are_bytes():
    reading = local(f"{L}.dram.size = 1073741824")
    assert reading.options.dram_size == 1 << 30
    assert reading.options.max_dram_size is None
    assert reading.warnings == []
    assert "expected bytes" in refused(f"{L}.dram.size = 1G")


@pytest.mark.parametrize(
    ("line", "fragment"),
    [
        (f"{L}.protocol = pigeon", "device_sdma"),
        (f"{L}.world_size = 0", "at least 1"),
        (f"{L}.world_size = many", "at least 1"),
        (f"{L}.storage.enabled = maybe", "true or false"),
        ("ubsio.mem.size_in_gb = 3073", "from 0 to 3072"),
        ("ubsio.mem.size_in_gb = 1.5", "from 0 to 3072"),
        ("ock.mmc.log_level = loud", "info"),
        ("ubsio.disk.path = nvme0", "absolute device paths"),
    ],
)
def test_wrong_values(line, fragment):
    message = refused(line)
    assert fragment in message
    assert message.startswith(f"mmc-local.conf: {line.split(' =')[0]}=")


@pytest.mark.parametrize(
    "url", ["h:5000", "tcp://h", "tcp://:5000", "tcp://h:port", "tcp://h:0", "tcp://h:70000", "udp://h:5000", "tcp:// h:5000", ""]
)
def test_urls(url):
    with pytest.raises(OptionError, match="meta_service_url"):
        read_local_conf(LOCAL.replace("tcp://h:5000", url), "f")


def test_a_listener_for_other_hosts_is_named(tmp_path):
    for url, named in (("tcp://10.0.0.1:7000", 1), ("tcp://0.0.0.0:7000", 1), ("tcp://127.0.0.1:7000", 0)):
        (tmp_path / "mmc-local.conf").write_text(LOCAL + f"{L}.hcom_url = {url}\n")
        env = {"MMC_LOCAL_CONFIG_PATH": str(tmp_path / "mmc-local.conf")}
        notes = load_ascend_store({"backend": "memcache"}, kv_role="kv_both", env=env).notes
        assert sum(url in note for note in notes) == named


def test_missing_url():
    with pytest.raises(OptionError, match=r"config_store_url.* is required"):
        read_local_conf("ock.mmc.meta_service_url = tcp://h:5000\n", "f")


def test_comment_after_a_value_names_line_and_key():
    message = refused(f"{L}.storage.enabled = false  # off")
    assert message.startswith("mmc-local.conf: line 3: comment after the value")
    fixed, removed = clean_conf(LOCAL + f"# kept\n{L}.storage.enabled = false  # off\n", "f")
    assert fixed.endswith(f"# kept\n{L}.storage.enabled = false\n")
    assert removed == ["f: line 4: removed a comment"]
    assert read_local_conf(fixed, "f").options.storage_enabled is False


def test_broken_lines():
    assert "line 3" in refused("just words")
    assert "appears twice" in refused("ock.mmc.log_level = info", "ock.mmc.log_level = info")


def test_the_ssd_tier_is_passed_through_and_one_line_says_so(tmp_path):
    path = tmp_path / "mmc-local.conf"
    lines = [f"{L}.storage.enabled = true", "ubsio.disk.path = /dev/a:/dev/b", "ubsio.standalone.device_count = 1"]
    path.write_text(LOCAL + "\n".join(lines))
    env = {"MMC_LOCAL_CONFIG_PATH": str(path)}
    loaded = load_ascend_store({"backend": "memcache"}, kv_role="kv_both", env=env, deployment=on())
    assert loaded.backend_file.options.storage_enabled
    assert loaded.warnings == [
        "storage.enabled: the SSD tier of MemCache is handed to the library as it is; kvpool was never run with it"
    ]


def test_keys_of_the_library_pass_and_others_are_a_warning():
    assert local(f"{L}.hbm.size = 0", "ubsio.wcache.evict_water_level = 5", "ock.mmc.log_path = /x").warnings == []
    assert local(f"{L}.wold_size = 2").warnings == [
        f"mmc-local.conf: unknown key '{L}.wold_size' goes to the library unchecked: did you mean {L}.world_size?"
    ]


def test_meta_conf():
    lines = "ock.mmc.evict_threshold_high = 70\nock.mmc.evict_threshold_low = 60\n"
    lines += "ock.mmc.rewarm.dram_watermark = 95\nock.mmc.meta.lease_ttl_ms = 30000\n"
    options = read_meta_conf(META + lines, "m").options
    assert (options.evict_threshold_high, options.evict_threshold_low, options.rewarm_watermark, options.lease_ttl_ms) == (
        70,
        60,
        95,
        30000,
    )
    with pytest.raises(OptionError, match="must be below"):
        read_meta_conf(META + "ock.mmc.evict_threshold_high = 60\nock.mmc.evict_threshold_low = 60\n", "m")
    with pytest.raises(OptionError, match="from 1 to 100"):
        read_meta_conf(META + "ock.mmc.evict_threshold_high = 101\n", "m")


def test_both_files_agree():
    meta = read_meta_conf(META, "m").options
    check_pair(local().options, meta, "f")
    other = read_local_conf(LOCAL.replace(":6000", ":6001"), "f").options
    with pytest.raises(OptionError, match="differs from tcp://h:6000"):
        check_pair(other, meta, "f")


def test_the_two_kinds_are_told_apart():
    assert conf_kind(parse_conf(LOCAL, "f")) == "local"
    assert conf_kind(parse_conf(META, "f")) == "meta"
