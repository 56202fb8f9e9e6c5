"""`kvpool up` with real engines: it answers, engines and pool do what the mode says, and nothing is left behind."""

from __future__ import annotations

import json
import select
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvpool.ops.demo.chat import counted
from kvpool.ops.launch.place import PREFIX
from kvpool.ops.services.ports import free_port, free_ports
from tests.engine import models
from tests.engine.runner import EngineSpec, tokens

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

    def end(self, number: int) -> int:
        self._process.send_signal(number)
        rest, _ = self._process.communicate(timeout=END_S)
        self.told += rest.splitlines()
        return self._process.returncode


@contextmanager
def up(folder: Path, *arguments: str) -> Iterator[Up]:
    env = {**EngineSpec("qwen3").environment(), "TMPDIR": str(folder), "VLLM_RPC_BASE_PATH": str(folder)}
    code = "from kvpool.cli import app; app()"
    command = [sys.executable, "-c", code, "up", *arguments, "--model", str(models.model_path("qwen3")), "--served-model-name", "m"]
    command += ["--kv-cache", "256MB", "--dram", "256MB", "--", *ENGINE.split()]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env, bufsize=1) as process:
        try:
            yield Up(process)
        finally:
            process.terminate()  # it ends what it has started; killed, it could not
            try:
                process.communicate(timeout=END_S)
            except subprocess.TimeoutExpired:
                process.kill()


def ask(port: int, prompt: list[int], max_tokens: int) -> list[int]:
    body = {"model": "m", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    data = json.dumps({**body, "return_token_ids": True, "detokenize": False}).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        choice: dict[str, Any] = json.load(answer)["choices"][0]
    ids: list[int] = choice["token_ids"]
    assert len(ids) == max_tokens
    return ids


def until(port: int, name: str, wanted: int) -> None:
    end = time.monotonic() + STORED_S
    while counted(f"http://127.0.0.1:{port}", name) < wanted:
        assert time.monotonic() < end, f"{name} stays at {counted(f'http://127.0.0.1:{port}', name)}"
        time.sleep(0.1)


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
