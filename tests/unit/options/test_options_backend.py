"""Which store is chosen, why, and that only its own file is read."""

from __future__ import annotations

import pytest

from kvpool.options import OptionError, load_ascend_store
from kvpool.options.load import read_ascend_store

MOONCAKE = '{"master_server_address": "127.0.0.1:50088"}'
MEMCACHE = "ock.mmc.meta_service_url = tcp://h:5000\nock.mmc.local_service.config_store_url = tcp://h:6000\n"
YUANRONG = '{"worker_addr": "127.0.0.1:31501"}'
FILES = {
    "mooncake": ("MOONCAKE_CONFIG_PATH", MOONCAKE),
    "memcache": ("MMC_LOCAL_CONFIG_PATH", MEMCACHE),
    "yuanrong": ("YR_CONFIG_PATH", YUANRONG),
}


@pytest.fixture
def env_of(tmp_path):
    """The environment of one backend, whose file is good; the variables of the others point to files that do not exist."""

    def build(backend, *, others=True):
        path = tmp_path / backend
        path.write_text(FILES[backend][1])
        env = {variable: str(tmp_path / "missing") for variable, _ in FILES.values()} if others else {}
        return env | {FILES[backend][0]: str(path)}

    return build


@pytest.mark.parametrize("backend", sorted(FILES))
def test_bc_001_only_the_file_of_the_chosen_backend_is_read(backend, env_of):
    loaded = read_ascend_store({"backend": backend, "lookup_rpc_port": "0"}, kv_role="kv_both", env=env_of(backend))
    assert loaded.options.backend == backend
    assert loaded.backend_file is not None
    assert loaded.backend_file.backend == backend
    assert loaded.warnings == []


@pytest.mark.parametrize("backend", sorted(FILES))
def test_bc_001_a_missing_variable_or_file_is_named(backend, tmp_path):
    variable = FILES[backend][0]
    with pytest.raises(OptionError, match=variable):
        load_ascend_store({"backend": backend}, kv_role="kv_both", env={})
    with pytest.raises(OptionError, match=f"{variable}=.*cannot be read"):
        load_ascend_store({"backend": backend}, kv_role="kv_both", env={variable: str(tmp_path / "missing")})
    with pytest.raises(OptionError, match=f"{variable}=.*cannot be read"):
        load_ascend_store({"backend": backend}, kv_role="kv_both", env={variable: str(tmp_path)})


@pytest.mark.parametrize("backend", sorted(FILES))
def test_bc_001_nothing_of_a_store_is_imported(backend, env_of, monkeypatch):
    for module in ("mooncake", "memcache_hybrid", "yr"):
        monkeypatch.setitem(__import__("sys").modules, module, None)  # makes `import module` raise ImportError
    assert read_ascend_store({"backend": backend}, kv_role="kv_both", env=env_of(backend)).options.backend == backend


@pytest.mark.parametrize("backend", sorted(FILES))
def test_every_store_can_be_chosen_and_its_file_is_validated_first(backend, env_of, tmp_path):
    assert load_ascend_store({"backend": backend}, kv_role="kv_both", env=env_of(backend)).options.backend == backend
    broken = tmp_path / "broken"
    broken.write_text("{")
    with pytest.raises(OptionError, match="broken: line 1"):
        load_ascend_store({"backend": backend}, kv_role="kv_both", env={FILES[backend][0]: str(broken)})


def test_unset_backend_is_local_with_one_warning():
    loaded = load_ascend_store({}, kv_role="kv_both", env={})
    assert loaded.options.backend == "local"
    assert loaded.options.backend_reason in loaded.warnings[0]
    assert len(loaded.warnings) == 1
    assert load_ascend_store({}, kv_role="kv_both", env={"MOONCAKE_CONFIG_PATH": ""}).options.backend == "local"


def test_unset_backend_follows_the_mooncake_variable(env_of):
    for role in ("kv_both", "kv_producer"):
        loaded = read_ascend_store({}, kv_role=role, env=env_of("mooncake", others=False))
        assert loaded.options.backend == "mooncake"
        assert loaded.sources["backend"] == "environment MOONCAKE_CONFIG_PATH"
        assert len(loaded.warnings) == 1
        assert "MOONCAKE_CONFIG_PATH" in loaded.warnings[0]


@pytest.mark.parametrize(
    "variable", ["MMC_LOCAL_CONFIG_PATH", "YR_CONFIG_PATH", "DS_WORKER_ADDR", "MOONCAKE_MASTER", "MOONCAKE_GLOBAL_SEGMENT_SIZE"]
)
@pytest.mark.parametrize("role", ["kv_both", "kv_producer", "kv_consumer"])
def test_unset_backend_with_signs_of_another_store_is_an_error(variable, role):
    with pytest.raises(OptionError, match=f"backend: .*{variable}"):
        load_ascend_store({}, kv_role=role, env={variable: "x"})


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer"])
def test_a_node_that_lost_its_variable_gets_no_private_pool(role):
    with pytest.raises(OptionError, match="MOONCAKE_CONFIG_PATH"):
        load_ascend_store({}, kv_role=role, env={})
    assert load_ascend_store({"backend": "local", "consumer_is_to_load": True}, kv_role=role, env={}).options.backend == "local"


def test_signs_of_two_stores_are_an_error_too(env_of):
    with pytest.raises(OptionError, match="MMC_LOCAL_CONFIG_PATH"):
        load_ascend_store({}, kv_role="kv_both", env=env_of("mooncake"))


def test_yuanrong_from_the_environment_alone():
    loaded = read_ascend_store({"backend": "yuanrong"}, kv_role="kv_both", env={"DS_WORKER_ADDR": "10.0.0.1:31501"})
    assert loaded.backend_file is not None
    assert loaded.backend_file.options.worker_addr == "10.0.0.1:31501"
    assert loaded.backend_file.sources["worker_addr"] == "environment DS_WORKER_ADDR"


def test_a_file_that_is_no_text_is_named(tmp_path):
    path = tmp_path / "mooncake.json"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(OptionError, match="UTF-8"):
        load_ascend_store({"backend": "mooncake"}, kv_role="kv_both", env={"MOONCAKE_CONFIG_PATH": str(path)})
    path.write_bytes(b" " * (2 << 20))
    with pytest.raises(OptionError, match="larger than"):
        load_ascend_store({"backend": "mooncake"}, kv_role="kv_both", env={"MOONCAKE_CONFIG_PATH": str(path)})
