"""An engine that is none: a real HTTP server that keeps prefixes as vLLM and the pool do, and that can be told to misbehave."""

from __future__ import annotations

import json
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from kvpool.ops.acceptance.client import Client

BLOCK = 128
Prefix = tuple[Any, ...]


class StandIn:
    """``pool``: what engines share; None: no pool. ``vices``: wrong-on-hit, wrong-always, no-hits, ignores-salt, hangs, refuses,
    stores-nothing, blind-to-faults, forgets (its own cache), busy (its cache is never emptied)."""

    def __init__(self, pool: set[Prefix] | None, *vices: str, plan: Path | None = None) -> None:
        self.pool, self.vices, self.plan = pool, set(vices), plan
        self.device: set[Prefix] = set()
        self.counts: Counter[str] = Counter()
        self.lock, self.released = threading.Lock(), threading.Event()
        self.url = ""

    def faults(self) -> dict[str, Any]:
        if self.plan is None or not self.plan.exists() or "blind-to-faults" in self.vices:
            return {}
        calls: dict[str, Any] = json.loads(self.plan.read_text())["calls"]
        return calls

    def answer(self, prompt: list[int], count: int, salt: str) -> tuple[list[int], int]:
        """Tokens, and how many of the prompt were cached."""
        own = "" if "ignores-salt" in self.vices else salt
        prefixes = [(own, *prompt[:end]) for end in range(BLOCK, len(prompt), BLOCK)]
        with self.lock:
            local = 0 if "forgets" in self.vices else self._held(self.device, prefixes)
            hit, spoiled = self._from_pool(prefixes, local)
            self.device.update(prefixes)
            self._save(prefixes)
        tokens = random.Random(str(prompt)).choices(range(1000), k=count)
        if "wrong-always" in self.vices or spoiled or (hit and "wrong-on-hit" in self.vices):
            tokens[-1] += 1
        return tokens, local + hit

    def _from_pool(self, prefixes: list[Prefix], local: int) -> tuple[int, bool]:
        faults = self.faults()
        if "exists" in faults:
            self.counts['kvpool:misses_total{reason="timeout"}'] += 1
            return 0, False
        held = self._held(self.pool or set(), prefixes)
        if held <= local or "no-hits" in self.vices:
            return 0, False
        if "get" in faults and not faults["get"].get("corrupt"):
            self.counts["kvpool:load_failures_total"] += 1
            return 0, False
        self.counts["kvpool:hit_tokens_total"] += held - local
        return held - local, "get" in faults

    def _save(self, prefixes: list[Prefix]) -> None:
        new = [prefix for prefix in prefixes if self.pool is not None and prefix not in self.pool]
        if not new or "stores-nothing" in self.vices:
            return
        if "put" in self.faults():
            self.counts["kvpool:save_failures_total"] += len(new)
            return
        assert self.pool is not None
        self.pool.update(new)
        self.counts["kvpool:saved_blocks_total"] += len(new)

    @staticmethod
    def _held(kept: set[Prefix], prefixes: list[Prefix]) -> int:
        return next((number for number, prefix in enumerate(prefixes) if prefix not in kept), len(prefixes)) * BLOCK


class Handler(BaseHTTPRequestHandler):
    engine: StandIn

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("content-length") or 0)) or b"{}")
        if self.path == "/reset_prefix_cache":
            if "busy" not in self.engine.vices:
                self.engine.device.clear()
            self._send({"success": "busy" not in self.engine.vices})
            return
        if "hangs" in self.engine.vices:
            self.engine.released.wait(30)
            return
        if "refuses" in self.engine.vices:
            self._send({}, 500)
            return
        time.sleep(0.01)
        tokens, cached = self.engine.answer(body["prompt"], body["max_tokens"], body.get("cache_salt", ""))
        choice = {"token_ids": tokens if body["return_token_ids"] else None, "finish_reason": "length"}
        self._send({"choices": [choice], "usage": {"prompt_tokens_details": {"cached_tokens": cached}}})

    def do_GET(self) -> None:
        lines = [f'vllm:cache_config_info{{block_size="{BLOCK}",engine="0"}} 1.0']
        for name, value in self.engine.counts.items():
            bare, _, labels = name.partition("{")
            labels = labels.rstrip("}") or 'engine="0"'
            lines.append(f"{bare}{{{labels}}} {float(value)}")
        self._send("\n".join(lines))

    def _send(self, content: object, status: int = 200) -> None:
        data = (content if isinstance(content, str) else json.dumps(content)).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def serving(engine: StandIn, answer_s: float = 10.0, left_s: float = 60.0) -> Iterator[Client]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"engine": engine}))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    engine.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield Client("m", lambda most: min(most, left_s), engine.url, answer_s)
    finally:
        engine.released.set()
        server.shutdown()
        server.server_close()
        thread.join(5)
