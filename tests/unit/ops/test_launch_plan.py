"""What is started in each mode: pure, nothing runs."""

import json
import os
import socket
from dataclasses import replace
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from kvpool.cli import app
from kvpool.ops.launch.options import LaunchOptions, check, default_backend
from kvpool.ops.launch.place import choose_devices, choose_ports, shown_place
from kvpool.ops.launch.plan import Place, make_plan, plain_plan
from kvpool.ops.services.ports import HANDED_OUT, free_ports, quiet_ports
from kvpool.options import Deployment, OptionError
from kvpool.options.probe import Probe
from kvpool.options.transfer import parse_transfer_config

PORTS = {"--port": 8000, "--prefill-port": 8100, "--decode-port": 8200, "--kv-port": 20001}
PLACE = Place("/f", "/s", PORTS, "0123456789abcdef", "python", cpus=(0, 1, 2, 3))


def options(mode="pd", **more):
    return LaunchOptions(mode, "m", **more)


def argument(process, flag):
    return process.command[process.command.index(flag) + 1]


def transfer(process):
    return json.loads(argument(process, "--kv-transfer-config"))


def test_mixed_is_one_engine_that_takes_the_requests():
    plan = make_plan(options("mixed", served_name="q", engine_args=("--dtype", "float32")), PLACE)
    (engine,) = plan.processes
    assert (plan.url, plan.model, plan.service) == ("http://127.0.0.1:8000", "q", None)
    assert engine.command[-2:] == ("--dtype", "float32")
    assert argument(engine, "--port") == "8000"
    assert engine.ready == "http://127.0.0.1:8000/health"
    assert engine.env["VLLM_CPU_OMP_THREADS_BIND"] == "0,1,2,3"
    config = transfer(engine)
    assert config["kv_role"] == "kv_both"
    assert config["kv_connector_extra_config"]["local_pool_root"] == "/s"


def test_a_pair_has_a_side_each_and_a_proxy_in_front():
    plan = make_plan(options(tp=2), PLACE)
    prefill, decode, proxy = plan.processes
    assert plan.url == "http://127.0.0.1:8000"
    assert [process.env["VLLM_CPU_OMP_THREADS_BIND"] for process in (prefill, decode)] == ["0|1", "2|3"]
    assert prefill.ports == {"--prefill-port": 8100, "--kv-port": 20001}
    assert decode.ports == {"--decode-port": 8200}
    assert (argument(proxy, "--prefiller-ports"), argument(proxy, "--decoder-ports")) == ("8100", "8200")
    assert {process.env["KVPOOL_SECRET"] for process in plan.processes} == {PLACE.secret}
    pull, pool = transfer(decode)["kv_connector_extra_config"]["connectors"]
    assert (pull["kv_connector"], pool["kv_connector"]) == ("MooncakeConnectorV1", "AscendStoreConnector")
    assert pull["kv_connector_extra_config"]["prefill"] == {"dp_size": 1, "tp_size": 2}
    assert pool["kv_connector_extra_config"]["consumer_is_to_put"] is True
    assert "kv_load_failure_policy" not in pool, "of no effect there"
    assert transfer(decode)["kv_load_failure_policy"] == "recompute"


@pytest.mark.parametrize("mode", ["mixed", "pd"])
@pytest.mark.parametrize("pool", [None, "main"])
def test_the_connectors_options_are_accepted_without_a_warning(mode, pool):
    plan = make_plan(options(mode, pool=pool), PLACE)
    for process in plan.processes:
        if process.name != "proxy":
            parsed = parse_transfer_config(transfer(process), env={}, deployment=Deployment(tp=1, dp=1, pp=1, device="cpu"))
            assert parsed.warnings == []


@pytest.mark.parametrize(
    ("mode", "backend", "tp", "owner", "rank"),
    [
        ("mixed", "mooncake", 2, 0, 512),
        ("pd", "mooncake", 1, 0, 512),
        ("pd", "memcache", 2, 0, 256),
        ("separated", "mooncake", 2, 1024, 0),
        ("separated", "memcache", 1, 1024, 0),
        ("mixed", "yuanrong", 1, 1024, 0),
    ],
)
def test_who_gives_the_memory(mode, backend, tp, owner, rank):
    service = make_plan(options(mode, backend=backend, tp=tp, dram=1 << 30), PLACE).service
    assert (service.backend, service.owner_dram >> 20, service.engine_dram >> 20) == (backend, owner, rank)


def test_engines_of_a_service_name_only_the_store():
    (engine,) = make_plan(options("separated", backend="mooncake"), PLACE).processes
    assert transfer(engine)["kv_connector_extra_config"] == {"backend": "mooncake"}


def test_fewer_cpus_than_ranks_are_shared():
    plan = make_plan(options(), replace(PLACE, cpus=(5,)))
    assert [process.env["VLLM_CPU_OMP_THREADS_BIND"] for process in plan.processes[:2]] == ["5", "5"]


def test_gpus_are_dealt_out():
    plan = make_plan(options(tp=2, device="cuda", backend="mooncake"), replace(PLACE, devices=tuple("0123")))
    assert [process.env["CUDA_VISIBLE_DEVICES"] for process in plan.processes[:2]] == ["0,1", "2,3"]


def test_the_plain_engine_has_no_connector_and_the_cpus_of_prefill():
    (engine,) = plain_plan(options(), PLACE).processes
    assert "--kv-transfer-config" not in engine.command
    assert engine.env["VLLM_CPU_OMP_THREADS_BIND"] == "0,1"


def test_where_requests_go_on_all_interfaces():
    assert make_plan(options("mixed", host="0.0.0.0"), PLACE).url == "http://127.0.0.1:8000"
    assert make_plan(options("mixed", host="::1"), PLACE).url == "http://[::1]:8000"


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"mode": "combined"}, 'MODE="combined": accepted: mixed, pd, separated'),
        ({"backend": "floppy"}, "accepted: local, mooncake, memcache, yuanrong"),
        ({"mode": "separated"}, "has no process that owns the memory"),
        ({"device": "npu"}, "--series a2, a3 or a5"),
        ({"device": "cuda"}, "does not reach the memory of cuda"),
        ({"device": "cuda", "backend": "memcache"}, "does not reach the memory of cuda"),
        ({"device": "cuda", "backend": "yuanrong"}, "does not reach the memory of cuda; accepted: mooncake"),
        ({"device": "cuda", "backend": "mooncake"}, "runs engines on CPUs only: give --device cpu"),
        ({"backend": "mooncake", "pool": "x"}, '--pool="x": names a pool of the local store'),
        ({"mode": "mixed", "kv_port": 4}, "--kv-port=4: there is no such port in mode mixed"),
        ({"port": 4, "decode_port": 4}, "--decode-port=4: is that of --port already"),
        ({"engine_args": ("--tensor_parallel_size=2",)}, "use --tensor-parallel-size before --"),
        ({"engine_args": ("--kv-transfer-config", "{}")}, "is set by the launch"),
    ],
)
def test_mistakes(given, line):
    with pytest.raises(OptionError) as found:
        check(options(**given))
    assert line in str(found.value)


@pytest.mark.parametrize(
    ("model", "line"),
    [
        ("/nonexist", '--model="/nonexist": is no folder of this host'),
        ("./nonexist", '--model="./nonexist": is no folder of this host'),
        ("models/of/mine", '--model="models/of/mine": is no folder of this host'),
        ("mine/", '--model="mine/": is no folder of this host'),
        ("", '--model="": is no folder of this host'),
        ("FOLDER", "is a folder without config.json"),
    ],
)
def test_a_path_that_leads_to_no_model_is_refused_before_anything_starts(model, line, tmp_path):
    with pytest.raises(OptionError) as found:
        check(replace(options(), model=model.replace("FOLDER", str(tmp_path))))
    assert line in str(found.value)
    assert str(found.value).endswith("accepted: a folder with config.json, or a name on the hub, as owner/name")


def test_folders_files_and_names_of_hubs_are_models(tmp_path):
    (tmp_path / "config.json").touch()
    (tmp_path / "weights.gguf").touch()
    for model in (str(tmp_path), str(tmp_path / "weights.gguf"), "gpt2", "Qwen/Qwen3-0.6B", "s3://bucket/of/models"):
        check(replace(options(), model=model))


def test_a_secret_that_the_engines_would_refuse_is_refused_before_they_start(monkeypatch):
    monkeypatch.setenv("KVPOOL_SECRET", "short")
    with pytest.raises(OptionError, match=r'^KVPOOL_SECRET="5 characters": accepted: at least 16 characters$'):
        check(options())
    check(options("mixed"))  # where nobody uses it


def test_a_launch_is_shown_where_the_system_does_not_tell_its_cpus(monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    assert shown_place(options()).cpus == (0, 1, 2)


def test_a_launch_elsewhere_than_on_linux_is_one_line(monkeypatch):
    monkeypatch.setattr("kvpool.ops.launch.descendants.ctypes", SimpleNamespace(CDLL=lambda *given, **more: object()))
    result = CliRunner().invoke(app, ["up", "mixed", "--model", "m", "--device", "cpu"])
    assert (result.exit_code, result.output) == (1, "error: processes are started, and ended again, on Linux only\n")


def test_the_usual_store():
    assert default_backend("pd", "cpu") == "local"
    assert default_backend("separated", "cpu") == default_backend("mixed", "cuda") == "mooncake"


def test_ports_are_free_and_different_and_a_taken_one_is_one_error():
    chosen = choose_ports(options())
    assert len(set(chosen.values())) == 4
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OptionError, match=f"--kv-port={port}: cannot be listened on"):
            choose_ports(options(kv_port=port))
    assert choose_ports(options(kv_port=port))["--kv-port"] == port


def test_too_few_gpus(tmp_path):
    (tmp_path / "dev").mkdir()
    for name in ("nvidia0", "nvidia1", "nvidiactl"):
        (tmp_path / "dev" / name).touch()
    probe = Probe(str(tmp_path))
    two = options(device="cuda", backend="mooncake")
    assert choose_devices(two, probe, {}) == ("0", "1")
    with pytest.raises(OptionError, match="need 4 GPUs, and this host shows 2"):
        choose_devices(replace(two, tp=2), probe, {})


def test_gpus_that_the_environment_hides_are_not_taken(tmp_path):
    two = options(device="cuda", backend="mooncake")
    assert choose_devices(two, Probe(str(tmp_path)), {"CUDA_VISIBLE_DEVICES": "6, GPU-0a1b"}) == ("6", "GPU-0a1b")
    for shown in ("6", ""):
        with pytest.raises(OptionError, match="need 2 GPUs, and CUDA_VISIBLE_DEVICES shows "):
            choose_devices(two, Probe(str(tmp_path)), {"CUDA_VISIBLE_DEVICES": shown})


def test_ports_are_not_those_that_the_system_hands_out(tmp_path):
    range_file = tmp_path / "range"
    range_file.write_text("20000\t60999\n")
    for _ in range(20):
        assert all(port < 20000 for port in quiet_ports(range_file))
    range_file.write_text("1024\t65535\n")  # nothing else is left
    assert list(quiet_ports(range_file))
    low, high = map(int, HANDED_OUT.read_text().split())
    assert not [port for port in choose_ports(options()).values() if low <= port <= high]


def test_free_ports_are_different_and_free():
    ports = free_ports(20)
    assert len(set(ports)) == 20
    with pytest.raises(OSError, match=r"[Aa]ssign"):
        free_ports(1, "192.0.2.1")
