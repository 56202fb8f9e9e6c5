"""The disk tier of the local store in kv_connector_extra_config."""

import os
import shutil
from types import SimpleNamespace

import pytest

from kvpool.options import OptionError, load_ascend_store

ON = {"enable_ssd_offload": True, "local_ssd_size": "1GB"}


def load(extra, **others):
    return load_ascend_store({"backend": "local", **extra}, kv_role="kv_both", env={}, **others)


def refused(extra) -> str:
    with pytest.raises(OptionError) as caught:
        load(extra)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_all_of_it(tmp_path):
    loaded = load({**ON, "ssd_offload_path": str(tmp_path), "local_ssd_admission": "Second_Sight", "local_dram_low_watermark": 0})
    options = loaded.options
    assert loaded.warnings == []
    assert (options.enable_ssd_offload, options.ssd_offload_path, options.local_ssd_size) == (True, str(tmp_path), 1 << 30)
    assert (options.local_ssd_admission, options.local_dram_low_watermark, options.local_ssd_high_watermark) == (
        "second_sight",
        0,
        95,
    )


def test_bc_156_each_bad_directory_has_its_own_error_and_only_when_it_is_on(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    bad = {
        "": "is required with enable_ssd_offload",
        "relative/dir": "is not absolute",
        f"{tmp_path}/real/../real": "must not contain ..",
        f"{tmp_path}/link": "symbolic link",
        f"{tmp_path}/missing": "does not exist",
        f"{tmp_path}/file": "is not a directory",
        7: "expected an absolute path",
    }
    for path, fragment in bad.items():
        assert fragment in refused({**ON, "ssd_offload_path": path})
        for off in (False, "false", 0, None):
            warnings = load({"enable_ssd_offload": off, "ssd_offload_path": path}).warnings
            assert warnings == ([] if path == 7 else ["ssd_offload_path: no effect without enable_ssd_offload"])
    assert "ssd_offload_path" in refused(ON)
    assert load({**ON, "ssd_offload_path": f"{tmp_path}/real/"}).warnings == []
    monkeypatch.setattr(os, "access", lambda *arguments: False)
    assert "is not writable" in refused({**ON, "ssd_offload_path": f"{tmp_path}/real"})


@pytest.mark.parametrize("value", ["maybe", [], 2, "on"])
def test_bc_005_the_switch_is_a_boolean(value):
    assert "enable_ssd_offload" in refused({"enable_ssd_offload": value})


def test_a_size_is_required_and_says_what_is_free(tmp_path):
    assert "GB are free now" in refused({"enable_ssd_offload": True, "ssd_offload_path": str(tmp_path)})
    assert "local_ssd_size" in refused({**ON, "ssd_offload_path": str(tmp_path), "local_ssd_size": "1KB"})


def test_bc_120_a_size_above_the_disk_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=5 << 30))
    extra = {"enable_ssd_offload": True, "ssd_offload_path": str(tmp_path)}
    assert load({**extra, "local_ssd_size": "5GB"}).warnings == []
    (warning,) = load({**extra, "local_ssd_size": "6GB"}).warnings
    assert "more than the 5.0 GB free" in warning
    (tmp_path / "default").mkdir()
    with open(tmp_path / "default" / "arena", "wb") as arena:
        os.posix_fallocate(arena.fileno(), 0, 2 << 20)
    assert load({**extra, "local_ssd_size": (5 << 30) + (2 << 20)}).warnings == [], "what is allocated already counts as room"


@pytest.mark.parametrize("tier", ["dram", "ssd"])
def test_watermarks_stand_in_order(tier, tmp_path):
    low, high = f"local_{tier}_low_watermark", f"local_{tier}_high_watermark"
    assert f"is above {high}=50" in refused({**ON, "ssd_offload_path": str(tmp_path), low: 60, high: 50})
    assert "an integer from" in refused({high: 101})


def test_options_without_the_tier_have_no_effect():
    (warning,) = load({"local_ssd_size": "1GB", "local_ssd_admission": "all"}).warnings
    assert warning == "local_ssd_size, local_ssd_admission: no effect without enable_ssd_offload"


def test_other_backends_have_their_own():
    with pytest.raises(OptionError, match="enable_ssd_offload=true: is an option of the local backend"):
        load_ascend_store({**ON, "backend": "memcache"}, kv_role="kv_both", env={"MMC_LOCAL_CONFIG_PATH": "/none"})
