"""Engines of a run: their processes on each device, and starting, ending, stopping and killing one among others."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.waiting import eventually

from kvpool.ops.acceptance.engines import Engines
from kvpool.ops.acceptance.options import AcceptanceOptions
from kvpool.ops.launch import Launch, LaunchOptions, Place, Plan, launched
from kvpool.ops.launch.plan import Process
from kvpool.ops.launch.run import answers
from kvpool.ops.services.ports import free_port
from kvpool.options.probe import Device

SERVER = """
import http.server, os, subprocess, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.send_header("content-length", "0"); self.end_headers()
    def log_message(self, *_): pass
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open(sys.argv[2], "w").write(f"{os.getpid()} {child.pid}")
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def _engines(launch: Launch | None, place: Place, device: Device = "cpu", backend: str = "local") -> Engines:
    options = AcceptanceOptions(device, backend, "model", kv_cache=5 << 20, tp=2, engine_args=("--seed", "3"))  # type: ignore[arg-type]
    return Engines(options, "model", launch, place, lambda most: most)  # type: ignore[arg-type]


PLACE = Place("folder", "shared", {}, "secret", "python3", cpus=(0, 1, 2, 3))


def _command(engines: Engines, pool: dict[str, object] | None, policy: str = "recompute") -> tuple[Process, dict[str, object]]:
    process, url = engines._process(engines.engine("one", pool, policy))
    assert process.ready == f"{url}/health"
    words = process.command
    config = json.loads(words[words.index("--kv-transfer-config") + 1]) if "--kv-transfer-config" in words else {}
    return process, config


def test_an_engine_on_cpus() -> None:
    process, config = _command(_engines(None, PLACE), {"load_async": False}, "fail")
    assert process.env["VLLM_CPU_OMP_THREADS_BIND"] == "0,1|2,3"
    assert process.env["VLLM_SERVER_DEV_MODE"] == "1"
    assert "KVPOOL_TAKEOVER" not in process.env
    assert {"--seed", "float32", "--enable-prefix-caching"} <= set(process.command)
    assert config["kv_load_failure_policy"] == "fail"
    extra = config["kv_connector_extra_config"]
    assert isinstance(extra, dict)
    assert extra["load_async"] is False
    assert (extra["local_pool_root"], extra["local_pool_name"], extra["local_dram_size"]) == ("shared", "acceptance", 1 << 30)


def test_the_reference_has_no_connector() -> None:
    _, config = _command(_engines(None, PLACE), None)
    assert config == {}


@pytest.mark.parametrize(("device", "takeover"), [("cuda", None), ("npu", "1")])
def test_an_engine_on_accelerators(device: Device, takeover: str | None) -> None:
    process, config = _command(_engines(None, PLACE, device, "mooncake"), {"load_async": True})
    assert "VLLM_CPU_OMP_THREADS_BIND" not in process.env
    assert "CUDA_VISIBLE_DEVICES" not in process.env
    assert process.env.get("KVPOOL_TAKEOVER") == takeover
    assert "--gpu-memory-utilization" in process.command
    assert "float32" not in process.command
    assert config["kv_connector_extra_config"] == {"backend": "mooncake", "max_pinned_save_percent": 50, "load_async": True}


@contextmanager
def _launch() -> Iterator[Launch]:
    said: list[str] = []
    with launched(LaunchOptions("mixed", "model"), said.append, 5.0, plan=lambda options, place: Plan((), "", "")) as (_, launch):
        yield launch


def _server(name: str, folder: Path) -> Process:
    port = free_port()
    command = (sys.executable, "-c", SERVER, str(port), str(folder / name))
    return Process(name, command, f"http://127.0.0.1:{port}/", ports={"--port": port})


def _pids(name: str, folder: Path) -> list[int]:
    return [int(pid) for pid in (folder / name).read_text().split()]


def _state(pid: int) -> str:
    """One letter, as ps has it; empty for none and for zombies."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""
    return "" if state == "Z" else state


def test_one_is_killed_and_started_again_and_the_others_stay(tmp_path: Path) -> None:
    with _launch() as launch:
        one, two = _server("one", tmp_path), _server("two", tmp_path)
        launch.add(one, 60.0)
        launch.add(two, 60.0)
        killed = _pids("one", tmp_path)
        launch.kill("one")
        assert [_state(pid) for pid in killed] == ["", ""]
        assert answers(two.ready)
        again = _server("one", tmp_path)
        launch.add(again, 60.0)
        assert answers(again.ready)
        ended = _pids("one", tmp_path)
        launch.end("one", 5.0)
        assert [_state(pid) for pid in ended] == ["", ""]
        assert answers(two.ready)
        left = _pids("two", tmp_path)
    assert [_state(pid) for pid in left] == ["", ""]


def test_one_is_stopped_and_goes_on(tmp_path: Path) -> None:
    with _launch() as launch:
        process = _server("one", tmp_path)
        launch.add(process, 60.0)
        engines = _engines(launch, PLACE)
        engine = engines.engine("one", None)
        engines.stop(engine)
        pids = _pids("one", tmp_path)
        eventually(lambda: [_state(pid) for pid in pids] == ["T", "T"], "they stand still")
        engines.go_on(engine)
        assert answers(process.ready)


def test_what_does_not_come_up_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    with _launch() as launch:
        silent = Process("silent", (sys.executable, "-c", "import time; time.sleep(600)"), "http://127.0.0.1:9/")
        began = time.monotonic()
        with pytest.raises(OSError, match=r"silent: no answer within 0\.5 s"):
            launch.add(silent, 0.5)
        assert time.monotonic() - began < 30
        dead = Process("dead", (sys.executable, "-c", "raise SystemExit('no such model')"), "http://127.0.0.1:9/")
        with pytest.raises(OSError, match="no such model"):
            launch.add(dead, 60.0)
        good = _server("good", tmp_path)
        launch.add(good, 60.0)  # those that failed are forgotten
        assert answers(good.ready)
