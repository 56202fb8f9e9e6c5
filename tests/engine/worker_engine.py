"""Child process of `runner.Engine`: one AsyncLLM, driven by JSON lines.

    python worker_engine.py ENGINE_ARGS.json REPLY_FD

Commands come on stdin, `{"id": n, "op": name, ...}`; replies go to REPLY_FD, with the id and either `result` or `error` (a text).
Commands run concurrently, so a long `generate` does not keep a later `metrics` waiting. End of input shuts the engine down.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import Any

_ids = itertools.count()


class Child:
    """Executes commands against one engine. Each public coroutine is a command."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    async def generate(
        self,
        prompts: list[list[int]],
        max_tokens: int = 16,
        logprobs: int | None = None,
        concurrent: bool = True,
        ignore_eos: bool = True,
        dp_ranks: list[int] | None = None,
        cache_salt: str | None = None,
        kv_transfer_params: dict[str, Any] | None = None,
    ) -> list[dict[str, Any]]:
        """Greedy generation of every prompt; an error of one request is its result, not an exception."""
        params = self._params(max_tokens, logprobs, ignore_eos, kv_transfer_params)
        ranks: list[int | None] = list(dp_ranks) if dp_ranks else [None] * len(prompts)
        runs = [self._one(p, params, r, cache_salt, _Progress()) for p, r in zip(prompts, ranks, strict=True)]
        if concurrent:
            return list(await asyncio.gather(*runs))
        return [await run for run in runs]

    async def abort(
        self,
        prompts: list[list[int]],
        abort: list[int],
        after_tokens: int = 0,
        after_s: float = 0.0,
        max_tokens: int = 64,
        by_cancel: bool = False,
        kv_transfer_params: dict[str, Any] | None = None,
    ) -> list[dict[str, Any]]:
        """Start every prompt, then abort some: after `after_s`, or once they have `after_tokens` tokens; `by_cancel` the way a
        dropped HTTP connection does it. Returns the results of all, aborted ones with what they had by then."""
        params = self._params(max_tokens, None, True, kv_transfer_params)
        progress = [_Progress() for _ in prompts]
        tasks = [asyncio.create_task(self._one(p, params, None, None, progress[i])) for i, p in enumerate(prompts)]
        await asyncio.sleep(after_s)
        for i in abort:
            while len(progress[i].tokens) < after_tokens and not tasks[i].done():
                await asyncio.sleep(0.001)
            if by_cancel:
                tasks[i].cancel()
            else:
                await self._engine.abort(progress[i].request_id)
        done = await asyncio.gather(*tasks, return_exceptions=True)
        return [r if isinstance(r, dict) else progress[i].result("cancelled") for i, r in enumerate(done)]

    async def write_file(self, path: str, text: str) -> None:
        """Replace a file in one step: switches a fault plan while the engine runs."""
        scratch = Path(f"{path}.{os.getpid()}")
        scratch.write_text(text)
        scratch.replace(path)

    async def reset_prefix_cache(self, reset_connector: bool = False) -> bool:
        return bool(await self._engine.reset_prefix_cache(reset_connector=reset_connector))

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def wait_idle(self, timeout_s: float = 90.0) -> float:
        """Wait until no engine core has anything to do, connector jobs included. Seconds waited."""
        core, began = self._engine.engine_core, time.monotonic()
        while True:
            engines = getattr(core, "core_engines", [core.core_engine])
            busy = [await core._call_utility_async("has_work", engine=e) for e in engines]
            waited = time.monotonic() - began
            if not any(busy):
                return waited
            if waited > timeout_s:
                raise TimeoutError(f"the engine is still busy after {timeout_s} s")
            await asyncio.sleep(0.01)

    async def metrics(self, prefixes: tuple[str, ...] = ("vllm:", "kvpool")) -> list[list[Any]]:
        """Prometheus samples `[name, labels, value]` of this process, without histogram buckets."""
        from prometheus_client import REGISTRY

        samples = [s for family in REGISTRY.collect() for s in family.samples]
        wanted = [s for s in samples if s.name.startswith(tuple(prefixes)) and not s.name.endswith(("_bucket", "_created"))]
        return [[s.name, {k: v for k, v in s.labels.items() if k != "model_name"}, s.value] for s in wanted]

    async def serve(self, host: str = "127.0.0.1", port: int = 0) -> int:
        """Serve vLLM's own HTTP interface there, by default on a free port, until the engine ends. The port."""
        import uvicorn
        from vllm.entrypoints.launchers.api_server.app_state import init_app_state
        from vllm.entrypoints.launchers.app import build_app
        from vllm.entrypoints.launchers.cli_args import make_arg_parser
        from vllm.entrypoints.launchers.launcher import NoSignalServer
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        model = self._engine.vllm_config.model_config.model
        args = make_arg_parser(FlexibleArgumentParser()).parse_args(
            ["--model", model, "--served-model-name", "tiny", "--skip-tokenizer-init"]
        )
        tasks = await self._engine.get_supported_tasks()
        app = build_app(args, tasks, self._engine.model_config)
        await init_app_state(self._engine, app.state, args, tasks)
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        self._server = NoSignalServer(uvicorn.Config(app, log_level="warning", access_log=False))
        self._serving = asyncio.create_task(self._server.serve([listener]))
        while not self._server.started:
            await asyncio.sleep(0.01)
        return int(listener.getsockname()[1])

    async def config(self) -> dict[str, Any]:
        """What vLLM made of our arguments."""
        config = self._engine.vllm_config
        return {
            "block_size": config.cache_config.block_size,
            "num_gpu_blocks": config.cache_config.num_gpu_blocks,
            "enable_prefix_caching": config.cache_config.enable_prefix_caching,
            "chunked_prefill": config.scheduler_config.enable_chunked_prefill,
            "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
            "compilation_mode": str(config.compilation_config.mode),
        }

    def _params(self, max_tokens: int, logprobs: int | None, ignore_eos: bool, kv_params: dict[str, Any] | None) -> Any:
        from vllm import SamplingParams

        extra = {"kv_transfer_params": kv_params} if kv_params else None
        return SamplingParams(
            temperature=0.0, max_tokens=max_tokens, logprobs=logprobs, ignore_eos=ignore_eos, detokenize=False, extra_args=extra
        )

    async def _one(
        self, prompt: list[int], params: Any, dp_rank: int | None, salt: str | None, progress: _Progress
    ) -> dict[str, Any]:
        inputs: dict[str, Any] = {"prompt_token_ids": prompt}
        if salt is not None:
            inputs["cache_salt"] = salt
        progress.began = time.monotonic()
        try:
            async for out in self._engine.generate(inputs, params, progress.request_id, data_parallel_rank=dp_rank):
                progress.update(out)
        except Exception as error:
            return progress.result("error", f"{type(error).__name__}: {error}")
        return progress.result(progress.finish_reason)


class _Progress:
    """What one request has produced so far."""

    def __init__(self) -> None:
        self.request_id = f"r{next(_ids)}"
        self.tokens: list[int] = []
        self.finish_reason: str | None = None
        self._logprobs: list[dict[int, float]] = []
        self._cached: int | None = None
        self._kv_params: dict[str, Any] | None = None
        self.began = time.monotonic()
        self._first: float | None = None

    def update(self, out: Any) -> None:
        completion = out.outputs[0]
        self.tokens = list(completion.token_ids)
        if self.tokens and self._first is None:
            self._first = time.monotonic() - self.began
        if completion.logprobs:
            self._logprobs = [{token: round(lp.logprob, 6) for token, lp in step.items()} for step in completion.logprobs]
        self.finish_reason = completion.finish_reason
        self._cached = out.num_cached_tokens
        self._kv_params = out.kv_transfer_params or self._kv_params

    def result(self, finish_reason: str | None, error: str | None = None) -> dict[str, Any]:
        return {
            "token_ids": self.tokens,
            "logprobs": self._logprobs,
            "num_cached_tokens": self._cached,
            "finish_reason": finish_reason,
            "error": error,
            "kv_transfer_params": self._kv_params,
            "ttft_s": self._first,
            "wall_s": time.monotonic() - self.began,
        }


async def _serve(child: Child, reply_fd: int) -> None:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=1 << 26)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    tasks: set[asyncio.Task[None]] = set()

    async def handle(command: dict[str, Any]) -> None:
        number, op = command.pop("id"), command.pop("op")
        try:
            _reply(reply_fd, {"id": number, "result": await getattr(child, op)(**command)})
        except Exception as error:
            traceback.print_exc()
            _reply(reply_fd, {"id": number, "error": f"{type(error).__name__}: {error}"})

    while line := await reader.readline():
        task = asyncio.create_task(handle(json.loads(line)))
        tasks.add(task)
        task.add_done_callback(tasks.discard)


def _reply(fd: int, message: dict[str, Any]) -> None:
    data = json.dumps(message).encode() + b"\n"
    while data:
        data = data[os.write(fd, data) :]


async def main(args_file: str, reply_fd: int) -> None:
    os.set_inheritable(reply_fd, False)
    began = time.monotonic()
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    if folder := os.environ.get("KVPOOL_TEST_CHANNEL"):
        from tests.engine.channel_faults import install

        install(Path(folder))
    args = AsyncEngineArgs(**json.loads(Path(args_file).read_text()))
    engine = AsyncLLM.from_engine_args(args)
    try:
        child = Child(engine)
        _reply(reply_fd, {"id": -1, "result": {"start_s": time.monotonic() - began, **await child.config()}})
        await _serve(child, reply_fd)
    finally:
        engine.shutdown()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
