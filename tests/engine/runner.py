"""Run one real vLLM engine in a process group of its own, and talk to it.

    with Engine(EngineSpec(model="qwen3", args={"block_size": 32}), log_dir=tmp_path) as engine:
        first = engine.generate([tokens((1, 1500))], max_tokens=16)

Or everything at once, from JSON: `python -m tests.engine.runner spec.json result.json`, where spec.json is
`{"model": ..., "args": {...}, "env": {...}, "steps": [{"op": "generate", "prompts": [{"parts": [[seed, length], ...]}]}, ...]}`.
Every wait has a deadline; when it passes, or when the engine dies, the whole group is killed and the end of the log is shown.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import psutil

from tests.engine import forked, models

Prompt = list[int]
START_TIMEOUT_S = 300.0
STEP_TIMEOUT_S = 180.0


class EngineFailure(RuntimeError):
    """The engine died, did not start, did not answer in time, or refused a step. The text ends with the tail of its log."""


@dataclass
class EngineSpec:
    """One engine. `model` is a name of `models.NAMES` or a folder; `args` are vLLM's engine arguments; the KV cache gets
    `kv_bytes` per worker (None: vLLM decides, after a warm-up). `prefix` comes before the command."""

    model: str
    args: dict[str, Any] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    kv_bytes: int | None = 256 << 20
    prefix: list[str] = field(default_factory=list)

    def engine_args(self) -> dict[str, Any]:
        """The arguments for AsyncEngineArgs: float32, eager, no tokenizer, unless `args` says otherwise."""
        folder = models.model_path(self.model) if self.model in models.NAMES else Path(self.model)
        defaults: dict[str, Any] = {
            "model": str(folder),
            "dtype": "float32",
            "enforce_eager": True,
            "skip_tokenizer_init": True,
            "max_model_len": 4096,
            "max_num_seqs": 8,
            "seed": 0,
            "disable_log_stats": False,
        }
        if self.kv_bytes is not None:
            defaults["kv_cache_memory_bytes"] = self.kv_bytes
        return {**defaults, **models.ENGINE_ARGS.get(self.model, {}), **self.args}

    def workers(self) -> int:
        """Worker processes of this engine."""
        sizes = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
        return int(np.prod([self.args.get(size, 1) for size in sizes]))

    def environment(self) -> dict[str, str]:
        """The child's environment: offline, loopback, one CPU per worker (a lone worker gets two), compile caches kept."""
        cache = models.cache_root()
        cpus = sorted(os.sched_getaffinity(0))
        workers = self.workers()
        lone = ",".join(str(cpu) for cpu in cpus[:2])
        binding = lone if workers == 1 else "|".join(str(cpus[i % len(cpus)]) for i in range(workers))
        root = str(Path(__file__).resolve().parents[2])
        return {
            **os.environ,
            "PYTHONUNBUFFERED": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")])),
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_HOST_IP": "127.0.0.1",
            "GLOO_SOCKET_IFNAME": "lo",
            "VLLM_CPU_OMP_THREADS_BIND": binding,
            "VLLM_USE_AOT_COMPILE": "0",  # vLLM 0.32 cannot load what it saves so on CPUs, and compiles it all again
            "VLLM_CACHE_ROOT": str(cache / "vllm"),
            "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
            **self.env,
        }


def tokens(*parts: tuple[int, int]) -> Prompt:
    """Token ids made of seeded pieces `(seed, length)`: equal leading pieces are a shared prefix."""
    return [int(t) for seed, length in parts for t in np.random.default_rng(seed).integers(3, models.VOCAB, length)]


def metric(samples: list[list[Any]], name: str, **labels: str) -> float:
    """Sum of the samples called `name` that carry all of `labels`."""
    return float(sum(v for n, have, v in samples if n == name and labels.items() <= have.items()))


class Engine:
    """A running engine. Use as a context manager: leaving it shuts the engine down and sweeps its process group."""

    def __init__(self, spec: EngineSpec, log_dir: Path | None = None, start_timeout_s: float = START_TIMEOUT_S) -> None:
        self.spec = spec
        self.folder = Path(log_dir or tempfile.mkdtemp(prefix="kvpool-engine-"))
        self.folder.mkdir(parents=True, exist_ok=True)
        fd, log = tempfile.mkstemp(prefix=f"engine-{Path(spec.model).name}-", suffix=".log", dir=self.folder)
        self.log_path = Path(log)
        args_file = self.log_path.with_suffix(".json")
        args_file.write_text(json.dumps(spec.engine_args(), indent=1))
        self._ids = itertools.count()
        self._replies: dict[int, dict[str, Any]] = {}
        self._segments: set[Path] = set()
        self._buffer = b""
        self._reply_fd, child_fd = os.pipe()
        self._process = _start_process(spec, args_file, fd, child_fd)
        os.close(fd)
        os.close(child_fd)
        try:
            self.started: dict[str, Any] = self._wait(-1, start_timeout_s, "start")
        except BaseException:
            self.kill()
            raise

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # -- steps

    def do(self, op: str, timeout_s: float = STEP_TIMEOUT_S, **arguments: Any) -> Any:
        """Run one step and return its result (see `worker_engine.Child` for the steps)."""
        return self.receive(self.send(op, **arguments), timeout_s)

    def send(self, op: str, **arguments: Any) -> int:
        """Start a step and return at once with its ticket for `receive`: for tests that break things meanwhile."""
        ticket = next(self._ids)
        if "prompts" in arguments:
            arguments["prompts"] = [_resolve(p) for p in arguments["prompts"]]
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"id": ticket, "op": op, **arguments}).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._failure(f"{op}: the engine is gone") from None
        return ticket

    def receive(self, ticket: int, timeout_s: float = STEP_TIMEOUT_S) -> Any:
        return self._wait(ticket, timeout_s, f"step {ticket}")

    def generate(self, prompts: list[Any], timeout_s: float = STEP_TIMEOUT_S, **options: Any) -> list[dict[str, Any]]:
        """Results in the order of the prompts: token_ids, num_cached_tokens, finish_reason, error, ttft_s, wall_s, logprobs."""
        results: list[dict[str, Any]] = self.do("generate", timeout_s, prompts=prompts, **options)
        return results

    def metrics(self) -> list[list[Any]]:
        samples: list[list[Any]] = self.do("metrics")
        return samples

    # -- processes

    def processes(self) -> dict[str, int]:
        """Name -> pid of every process in the group: `frontend`, `EngineCore…`, `Worker…` (as vLLM titles them)."""
        found = {"frontend": self._process.pid}
        for pid in _group(self._process.pid):
            with contextlib.suppress(psutil.Error):
                title = " ".join(psutil.Process(pid).cmdline())
                if title.startswith("VLLM::"):
                    found[title.removeprefix("VLLM::").strip()] = pid
        return found

    def signal(self, number: int) -> None:
        """Send a signal to every process of the engine."""
        for pid in _group(self._process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def kill(self) -> None:
        """SIGKILL the whole group, as an OOM killer or a `kill -9` would; nothing is shut down."""
        self._segments |= _shared_segments(self._process.pid)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        _until_gone(self._process.pid, 30.0)
        for segment in self._segments:
            segment.unlink(missing_ok=True)
        self._close_pipes()

    def close(self, timeout_s: float = 60.0) -> list[str]:
        """Shut down in order; whatever is left in the group afterwards is killed and returned (titles): a leak."""
        if self._process.poll() is None:
            self._segments |= _shared_segments(self._process.pid)
            self._close_stdin()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout_s)
        left = _until_gone(self._process.pid, 30.0)
        titles = [_title(pid) for pid in left]
        self.kill()
        return titles

    def log_tail(self, lines: int = 60) -> str:
        text = self.log_path.read_text(errors="replace").splitlines()
        return "\n".join(text[-lines:])

    # -- plumbing

    def _wait(self, ticket: int, timeout_s: float, what: str) -> Any:
        end = time.monotonic() + timeout_s
        while ticket not in self._replies:
            left = end - time.monotonic()
            if left <= 0:
                self.kill()
                raise self._failure(f"{what}: no answer in {timeout_s:.0f} s; the engine was killed")
            if select.select([self._reply_fd], [], [], min(left, 1.0))[0]:
                self._read(what)
        reply = self._replies.pop(ticket)
        if "error" in reply:
            raise self._failure(f"{what}: {reply['error']}")
        return reply["result"]

    def _read(self, what: str) -> None:
        data = os.read(self._reply_fd, 1 << 20)
        if not data:
            self.kill()
            raise self._failure(f"{what}: the engine ended with code {self._process.returncode}")
        *whole, self._buffer = (self._buffer + data).split(b"\n")
        for line in whole:
            reply = json.loads(line)
            self._replies[reply["id"]] = reply

    def _failure(self, text: str) -> EngineFailure:
        log = self.log_path.read_text(errors="replace")
        causes = list(dict.fromkeys(re.findall(r"^(?:\(.*\] )?(\w*(?:Error|Exception): .*)", log, re.MULTILINE)))[:5]
        return EngineFailure("\n".join([text, *causes, f"--- end of {self.log_path} ---", self.log_tail()]))

    def _close_stdin(self) -> None:
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()

    def _close_pipes(self) -> None:
        self._close_stdin()
        if self._reply_fd >= 0:
            os.close(self._reply_fd)
            self._reply_fd = -1


def _start_process(spec: EngineSpec, args_file: Path, log: int, replies: int) -> subprocess.Popen[bytes] | forked.Frontend:
    env = spec.environment()
    if forked.can_fork(spec.env, spec.prefix):
        return _nursery().start(args_file, env, log, replies)
    script = Path(__file__).with_name("worker_engine.py")
    command = [*spec.prefix, sys.executable, str(script), str(args_file), str(replies)]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=log, stderr=log, pass_fds=(replies,), env=env, start_new_session=True
    )


@functools.cache
def _nursery() -> forked.Nursery:
    folder = Path(tempfile.mkdtemp(prefix="kvpool-nursery-"))
    nursery = forked.Nursery(EngineSpec(model="").environment(), folder)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    atexit.register(nursery.close)
    return nursery


def run(spec: EngineSpec, steps: list[dict[str, Any]], log_dir: Path | None = None) -> list[Any]:
    """Start, run the steps one after another, shut down. The results in order."""
    with Engine(spec, log_dir) as engine:
        return [engine.do(**step) for step in steps]


def _resolve(prompt: Any) -> Prompt:
    """A prompt is a list of token ids, or `{"seed": s, "length": n}`, or `{"parts": [[seed, length], ...]}`."""
    if isinstance(prompt, dict):
        parts = prompt.get("parts") or [(prompt["seed"], prompt["length"])]
        return tokens(*(tuple(part) for part in parts))
    return list(prompt)


def _group(pgid: int) -> list[int]:
    """Live (not zombie) processes of a process group."""
    found = []
    for process in psutil.process_iter(["status"]):
        with contextlib.suppress(ProcessLookupError, psutil.Error):
            if os.getpgid(process.pid) == pgid and process.info["status"] != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
    return found


def _shared_segments(pgid: int) -> set[Path]:
    """Shared memory of vLLM's own (message queues, collectives) that the group maps: killed processes leave it behind."""
    found = set()
    for pid in _group(pgid):
        with contextlib.suppress(OSError):
            maps = Path(f"/proc/{pid}/maps").read_text()
            found.update(re.findall(r"(/dev/shm/(?:psm_|vllm_|sem\.mp-)[^/\n]*)$", maps, re.MULTILINE))
    return {Path(name) for name in found}


def _until_gone(pgid: int, timeout_s: float) -> list[int]:
    end = time.monotonic() + timeout_s
    while (left := _group(pgid)) and time.monotonic() < end:
        time.sleep(0.05)
    return left


def _title(pid: int) -> str:
    try:
        return " ".join(psutil.Process(pid).cmdline())
    except psutil.Error:
        return f"pid {pid}"


def main(spec_file: str, result_file: str) -> None:
    """Run a JSON spec: its `steps` against its engine; `{"started": ..., "results": [...]}` goes to the result file."""
    raw = json.loads(Path(spec_file).read_text())
    steps = raw.pop("steps", [])
    with Engine(EngineSpec(**raw)) as engine:
        results = [engine.do(**step) for step in steps]
        Path(result_file).write_text(json.dumps({"started": engine.started, "results": results}))


if __name__ == "__main__":
    main(*sys.argv[1:3])
