"""Ask a small real model about a long document three times: cold, again in the same engine, and in an engine started afterwards.

The last engine has never seen the document: what it does not compute, it takes from the pool. The last line is for scripts:
`RESULT identical=true cold_s=... device_hit_s=... pool_hit_s=...` (seconds to the first token); the exit code is 1 if an answer
differs or the pool was not used.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from kvpool.ops.demo import document
from kvpool.ops.demo.smollm import model_folder
from kvpool.stores import make_local_store

POOL = "demo"
CONNECTOR = {
    "kv_connector": "AscendStoreConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"backend": "local", "local_pool_name": POOL, "local_dram_size": "1GB"},
}
ENGINE_TIMEOUT_S = 600


def run_engine(folder: Path, name: str, asks: int, connector: dict[str, Any] | None) -> dict[str, Any]:
    """Start an engine in a process group of its own, let it answer, and see it end."""
    print(f"demo: engine {name}: starting", flush=True)
    request, answer, log = (folder / f"{name}.{part}" for part in ("request", "answer", "log"))
    question = {"model": str(model_folder()), "document": document.text(), "question": document.QUESTION}
    request.write_text(json.dumps({**question, "asks": asks, "connector": connector}))
    command = [sys.executable, str(Path(__file__).with_name("demo_engine.py")), str(request), str(answer)]
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=environment(), start_new_session=True)
        try:
            code = process.wait(ENGINE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            code = -signal.SIGKILL
        finally:
            kill_group(process)
    if code != 0:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-40:])
        raise SystemExit(f"{tail}\ndemo: engine {name} ended with code {code}; its last lines are above")
    result: dict[str, Any] = json.loads(answer.read_text())
    return result


def require_model() -> None:
    """Made now where it is not there; one line where that fails."""
    try:
        model_folder()
    except OSError as error:
        sys.exit(f"demo: {error}")


def end_when_told() -> None:
    """SIGTERM ends the engine and removes the pool, as Ctrl-C does."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


def kill_group(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


def environment() -> dict[str, str]:
    """Offline and on loopback: the demo needs no network once it has the model."""
    cpus = ",".join(str(cpu) for cpu in sorted(os.sched_getaffinity(0)))
    given = {"VLLM_CPU_OMP_THREADS_BIND": cpus, "VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "VLLM_NO_USAGE_STATS": "1"}
    return {**given, **os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def remove_pool() -> None:
    """Delete the demo's pool if there is one: its last user removes it."""
    pool = make_local_store(name=POOL, on_last_close="remove")
    with contextlib.suppress(FileNotFoundError):
        pool.open()
        pool.close()


def show(prompt_tokens: int, rows: dict[str, dict[str, Any]]) -> bool:
    """Print the table and the answer; whether every answer is the first one, token for token."""
    cold = rows["cold"]
    table = Table(title=f"SmolLM2-135M-Instruct, float32, CPU: a prompt of {prompt_tokens} tokens")
    for column in ("run", "cached", "from pool", "first token", "speed-up", "same"):
        table.add_column(column, justify="left" if column == "run" else "right")
    for name, row in rows.items():
        same = "yes" if row["token_ids"] == cold["token_ids"] else "NO"
        speed = f"{cold['ttft_s'] / row['ttft_s']:.1f}x"
        table.add_row(name, str(row["cached_tokens"]), str(row["pool_tokens"]), f"{row['ttft_s']:.3f} s", speed, same)
    console = Console()
    console.print(table)
    console.print(f"Question: {document.QUESTION}\nAnswer:   {cold['text'].strip()}", markup=False, highlight=False)
    return all(row["token_ids"] == cold["token_ids"] for row in rows.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--no-pool", action="store_true", help="run without the connector (the last run is then cold too)")
    connector = None if parser.parse_args().no_pool else CONNECTOR
    require_model()
    remove_pool()
    try:
        with tempfile.TemporaryDirectory(prefix="kvpool-demo-") as scratch:
            first = run_engine(Path(scratch), "A", 2, connector)
            second = run_engine(Path(scratch), "B", 1, connector)
    finally:
        remove_pool()
    cold, device_hit = first["asks"]
    (pool_hit,) = second["asks"]
    rows = {"cold": cold, "device hit": device_hit, "pool hit, restarted": pool_hit}
    identical = show(first["prompt_tokens"], rows)
    was_cold, from_pool = cold["cached_tokens"] == 0, pool_hit["pool_tokens"] > 0
    if not was_cold:
        print(f"demo: the first run was not cold: the pool {POOL!r} of an earlier run is still there", file=sys.stderr)
    if not from_pool:
        print("demo: the second engine did not load the document from the pool", file=sys.stderr)
    seconds = " ".join(
        f"{key}={row['ttft_s']:.3f}" for key, row in zip(("cold_s", "device_hit_s", "pool_hit_s"), rows.values(), strict=True)
    )
    print(f"RESULT identical={str(identical).lower()} {seconds}", flush=True)
    return 0 if identical and was_cold and from_pool else 1


if __name__ == "__main__":
    end_when_told()
    sys.exit(main())
