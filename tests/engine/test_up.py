"""`kvpool up` with real engines: it answers, engines and pool do what the mode says, and nothing is left behind."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvpool.ops.demo.chat import counted
from kvpool.ops.launch.abandoned import PREFIX
from kvpool.ops.launch.descendants import descendants
from kvpool.ops.services.ports import free_port, free_ports
from kvpool.ops.services.processes import start_time
from tests.ascend_stand_in.stage import Stage
from tests.engine import models
from tests.engine.runner import EngineSpec, tokens
from tests.stores.live import NEEDS
from tests.stores.memcache_pool import one_memcache_at_a_time
from tests.waiting import ended_after, eventually

READY_S, END_S, STORED_S = 240.0, 60.0, 60.0
ENGINE = "--dtype float32 --enforce-eager --skip-tokenizer-init --max-model-len 2048 --block-size 32 --seed 0"
SHARED = Path("/dev/shm")


class Up:
    """A running `kvpool up`; ``told`` is what it has said."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.told: list[str] = []

    def until_ready(self) -> None:
        end = time.monotonic() + READY_S
        assert self._process.stdout is not None
        while not any("ready: send requests" in line for line in self.told):
            assert select.select([self._process.stdout], [], [], max(0.0, end - time.monotonic()))[0], self.told
            line = self._process.stdout.readline()
            assert line, f"it ended: {self.told}"
            self.told.append(line)

    @property
    def pid(self) -> int:
        return self._process.pid

    def end(self, number: int) -> int:
        self._process.send_signal(number)
        rest, _ = self._process.communicate(timeout=END_S)
        self.told += rest.splitlines()
        return self._process.returncode


@contextmanager
def up(folder: Path, *arguments: str, prefix: Sequence[str] = ()) -> Iterator[Up]:
    """``prefix`` comes before its command."""
    env = {**EngineSpec("qwen3").environment(), "TMPDIR": str(folder), "VLLM_RPC_BASE_PATH": str(folder)}
    env["VLLM_SERVER_DEV_MODE"] = "1"  # in which an engine can be told to empty its own cache
    code = "from kvpool.cli import app; app()"
    command = [
        *prefix,
        sys.executable,
        "-c",
        code,
        "up",
        *arguments,
        "--model",
        str(models.model_path("qwen3")),
        "--served-model-name",
        "m",
    ]
    command += ["--kv-cache", "256MB", "--dram", "256MB", "--", *ENGINE.split()]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env, bufsize=1)
    with ended_after(process, END_S):
        yield Up(process)


def ask(port: int, prompt: list[int], max_tokens: int) -> list[int]:
    body = {"model": "m", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    data = json.dumps({**body, "return_token_ids": True, "detokenize": False}).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        choice: dict[str, Any] = json.load(answer)["choices"][0]
    ids: list[int] = choice["token_ids"]
    assert len(ids) == max_tokens
    return ids


def empty_cache(port: int) -> None:
    """The engine's own, not the pool."""
    request = urllib.request.Request(f"http://127.0.0.1:{port}/reset_prefix_cache", b"")

    def emptied() -> bool:
        ask(port, tokens((6200, 8)), 1)  # an idle engine hears of saves that have ended in its next step
        with urllib.request.urlopen(request, timeout=60) as answer:
            return bool(json.load(answer)["success"])

    eventually(emptied, "no block is in use", STORED_S)


def until(port: int, name: str, wanted: int) -> None:
    eventually(lambda: counted(f"http://127.0.0.1:{port}", name) >= wanted, f"{name} is {wanted}", STORED_S)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Where temporary files go: nothing may be left in it, and no pool in shared memory."""
    place = tmp_path / "t"
    place.mkdir()
    before = {path.name for path in SHARED.iterdir()}
    yield place
    assert not list(place.iterdir())
    left = {path.name for path in SHARED.iterdir()} - before
    assert not [name for name in left if name.startswith(PREFIX)]


def test_mixed_answers_and_stores_and_ends_with_ctrl_c(folder: Path) -> None:
    port = free_port()
    with up(folder, "mixed", "--port", str(port)) as running:
        running.until_ready()
        prompt = tokens((6000, 200))
        assert ask(port, prompt, 8) == ask(port, prompt, 8)
        until(port, "kvpool:saved_tokens_total", 192)
        assert running.end(signal.SIGINT) == 0
        assert running.told[-1].strip() == "up: stopped"


@contextmanager
def place_of(backend: str, folder: Path) -> Iterator[list[str]]:
    """Where a store's service can run, as what comes before a command; MemCache where there is a stand-in for the NPU's driver."""
    if backend != "memcache":
        NEEDS.get(backend, lambda: None)()
        yield []
        return
    with one_memcache_at_a_time():
        stage = Stage(folder)
        try:
            yield stage.prefix
            assert not stage.processes()
            shared = subprocess.run([*stage.prefix, "ls", "/dev/shm"], capture_output=True, text=True, check=True)
            assert shared.stdout == ""
        finally:
            stage.close()


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["memcache", "yuanrong"])
@pytest.mark.parametrize("mode", ["mixed", "separated"])
def test_one_engine_on_the_service_of_a_store(folder: Path, tmp_path: Path, mode: str, backend: str) -> None:
    port = free_port()
    with (
        place_of(backend, tmp_path) as prefix,
        up(folder, mode, "--port", str(port), "--backend", backend, prefix=prefix) as running,
    ):
        running.until_ready()
        prompt = tokens((6300, 200))
        answer = ask(port, prompt, 8)
        until(port, "kvpool:saved_tokens_total", 192)
        empty_cache(port)
        assert ask(port, prompt, 8) == answer
        assert counted(f"http://127.0.0.1:{port}", "vllm:prompt_tokens_by_source_total", source="external_kv_transfer") == 192
        assert running.end(signal.SIGINT) == 0
        assert running.told[-1].strip() == "up: stopped"


@pytest.mark.parametrize(
    ("whom", "backend"),
    [
        ("guard", "local"),
        pytest.param("guard", "memcache", marks=pytest.mark.slow),
        pytest.param("launch", "local", marks=pytest.mark.slow),
        pytest.param("guard", "yuanrong", marks=pytest.mark.slow),
        pytest.param("launch", "yuanrong", marks=pytest.mark.slow),
        pytest.param("launch", "memcache", marks=pytest.mark.slow),
    ],
)
def test_a_kill_leaves_nothing(folder: Path, tmp_path: Path, whom: str, backend: str) -> None:
    port = free_port()
    with (
        place_of(backend, tmp_path) as prefix,
        up(folder, "mixed", "--port", str(port), "--backend", backend, prefix=prefix) as running,
    ):
        running.until_ready()
        ours = {one for one in descendants() if one[0] == running.pid or running.pid in ancestors(one[0])}
        assert len(ours) >= 4, "the guard, the launch, the server and its engine"
        launch = next(pid for pid, _ in ours if ancestors(pid)[0] == running.pid)
        assert ask(port, tokens((6000, 200)), 8)
        os.kill(running.pid if whom == "guard" else launch, signal.SIGKILL)
        eventually(lambda: not any(start_time(pid) == started for pid, started in ours), "all processes are gone", END_S)
        eventually(lambda: not any(folder.iterdir()), "so are their files", END_S)


def ancestors(pid: int) -> list[int]:
    found = []
    while pid > 1:
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        found.append(pid)
    return found


def test_pd_moves_kv_and_the_next_turn_comes_from_the_pool(folder: Path) -> None:
    port, prefill, decode = free_ports(3)
    flags = ("--port", str(port), "--prefill-port", str(prefill), "--decode-port", str(decode))
    with up(folder, "pd", *flags) as running:
        running.until_ready()
        first = tokens((6100, 300))
        answer = ask(port, first, 40)
        computed = counted(f"http://127.0.0.1:{decode}", "vllm:prompt_tokens_by_source_total", source="local_compute")
        assert computed == 1, "decode computes the last token of a prompt"
        until(decode, "kvpool:saved_tokens_total", 32)
        second = [*first, *answer, *tokens((6101, 20))]
        hits = counted(f"http://127.0.0.1:{prefill}", "kvpool:hit_tokens_total")
        ask(port, second, 8)
        assert counted(f"http://127.0.0.1:{prefill}", "kvpool:hit_tokens_total") - hits == 32, "the block that decode filled"
        assert answer == ask(prefill, first, 40), "not what one engine says"
        assert running.end(signal.SIGTERM) == 0
        assert running.told[-1].strip() == "up: stopped"
