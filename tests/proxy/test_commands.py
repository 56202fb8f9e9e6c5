"""The commands of the guides, as they are written, with a real process; what must not start says so in one line."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from typer.testing import CliRunner

from kvpool.cli import app
from kvpool.ops.services.ports import free_port
from kvpool.options import OptionError
from kvpool.proxy.flags import read_flags
from tests.proxy.harness import PATIENCE_S, Running, clean_environment, engines, run, until

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = ROOT / "tests" / "guides" / "commands"
KVPOOL = [sys.executable, "-c", "from kvpool.cli import app; app()"]


def environment(**more: str) -> dict[str, str]:
    python = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    return {**clean_environment(), "PYTHONPATH": str(ROOT / "src"), "PATH": python, **more}


@asynccontextmanager
async def command(*words: str, cwd: Path, **env: str):
    """A process that ends with the block."""
    process = await asyncio.create_subprocess_exec(
        *words, cwd=cwd, env=environment(**env), stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@asynccontextmanager
async def client(port: int):
    async with aiohttp.ClientSession() as session:
        yield Running(f"http://127.0.0.1:{port}", "", session)


async def is_well(running: Running) -> bool:
    try:
        return (await running.get("/health")).status == 200
    except aiohttp.ClientError:
        return False


@pytest.mark.parametrize(
    ("name", "port", "called"), [("proxy_prefill_first.sh", None, False), ("proxy_decode_first.sh", 9000, True)]
)
def test_commands_of_the_guides_run_as_they_are_written(name, port, called, tmp_path) -> None:
    """Only the port numbers are others, since tests run beside anything. The first command sets no port: it gets one here."""
    subprocess.run([ROOT / "scripts" / "guide_tree.sh", tmp_path], check=True, capture_output=True, timeout=90)
    subprocess.run([*KVPOOL, "examples", tmp_path / "examples"], check=True, capture_output=True, timeout=90, env=environment())
    text = (COMMANDS / name).read_text().rstrip().removesuffix("\\").rstrip()
    own = free_port()

    async def scenario() -> None:
        async with engines() as (ps, ds):
            written = text.replace("8100", str(ps[0].port)).replace("8200", str(ds[0].port))
            written = written.replace(f"--port {port}", f"--port {own}") if port else f"{written} --port {own}"
            async with command("bash", "-c", f"exec {written}", cwd=tmp_path) as process, client(own) as running:
                await until(lambda: is_well(running))
                assert (await running.complete(stream=True)).text.endswith("<hello>")
                assert (ds[0].called == 202) == called
                process.send_signal(signal.SIGTERM)
                assert await asyncio.wait_for(process.wait(), PATIENCE_S) == 0
                events = [json.loads(line) for line in (await process.stderr.read()).decode().splitlines()]
                assert [line["event"] for line in events if line["event"].startswith(("proxy", "stop"))] == [
                    "proxy ready",
                    "stopping",
                    "stopped",
                ]

    run(scenario())


def test_kvpool_proxy_ends_its_streams_before_it_ends_and_logs_no_prompts(tmp_path) -> None:
    own = free_port()

    async def scenario() -> None:
        async with engines() as (ps, ds):
            flags = f"--port {own} --prefiller-hosts localhost --prefiller-ports {ps[0].port}"
            flags += f" --decoder-hosts localhost --decoder-ports {ds[0].port} --log-level debug"
            async with command(*KVPOOL, "proxy", *flags.split(), cwd=tmp_path) as process, client(own) as running:
                await until(lambda: is_well(running))
                ps[0].answer = None
                await running.complete("unlikely-word-7", n=0)  # goes on to decode, which answers
                ds[0].gate.clear()
                stream = asyncio.create_task(running.complete("unlikely-word-7", stream=True))
                await until(lambda: ds[0].now == 1)
                process.send_signal(signal.SIGTERM)
                await until(lambda: _refuses(own))
                ds[0].gate.set()
                assert (await stream).body.endswith(b"[DONE]\n\n")
                assert await asyncio.wait_for(process.wait(), PATIENCE_S) == 0
                text = (await process.stderr.read()).decode()
                requests = [line for line in map(json.loads, text.splitlines()) if line["event"] == "request"]
                assert [line["status"] for line in requests] == [200, 200]
                assert requests[1]["prefill"] == f"localhost:{ps[0].port}"
                assert "unlikely-word-7" not in text

    run(scenario())


def test_a_stream_without_end_does_not_keep_the_proxy(tmp_path) -> None:
    own = free_port()

    async def scenario() -> None:
        async with engines() as (ps, ds):
            flags = f"--port {own} --prefiller-hosts localhost --prefiller-ports {ps[0].port} --shutdown-timeout 1"
            flags += f" --decoder-hosts localhost --decoder-ports {ds[0].port}"
            async with command(*KVPOOL, "proxy", *flags.split(), cwd=tmp_path) as process, client(own) as running:
                await until(lambda: is_well(running))
                ds[0].words = ["x"] * 100_000
                ds[0].pause_s = 0.05
                stream = asyncio.create_task(running.complete(stream=True))
                await until(lambda: ds[0].now == 1)
                process.send_signal(signal.SIGTERM)
                assert await asyncio.wait_for(process.wait(), PATIENCE_S) == 0
                await until(ds[0].seen[0].cancelled.is_set)
                await asyncio.gather(stream, return_exceptions=True)

    run(scenario())


def _refuses(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(0.5)
        return probe.connect_ex(("127.0.0.1", port)) != 0


BASE = "--prefiller-hosts a --prefiller-ports 1 --decoder-hosts b --decoder-ports 2"


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (BASE + " --prefiler-ports 3", r"unrecognized arguments: --prefiler-ports \(did you mean --prefiller-ports\?\)"),
        ("--prefiler-hosts a", r"unrecognized arguments: --prefiler-hosts \(did you mean --prefiller-hosts\?\)"),
        ("--prefiler-hosts=a --port 70000", r"unrecognized arguments: --prefiler-hosts=a \(did you mean --prefiller-hosts\?\)"),
        (BASE + " --workers 4", "--workers=4: accepted: 1"),
        (BASE + " --port 70000", "--port: '70000' is not a port from 1 to 65535"),
        (BASE.replace("2", "2 3"), r"--decoder-ports=\[2, 3\]: 2 ports for 1 hosts in --decoder-hosts"),
        (BASE.replace("hosts a", "hosts 10.0.0.110.0.0.2"), "--prefiller-hosts=.* is no IPv4 address"),
        (BASE.replace("hosts a", "hosts http://a"), "--prefiller-hosts=.* is no"),
        (BASE + " --mode decode-first --host 0.0.0.0", '--host="0.0.0.0": decoders must call back'),
        (BASE + " --mode decode-first --host ::", '--host="::": decoders must call back'),
        (BASE + " --mode decode-first --metaserver-host 0", '--metaserver-host="0": decoders must call back'),
        (BASE + " --require-auth", r'--require-auth=\["a", "b"\]: these are not on loopback; set KVPOOL_SECRET'),
        (BASE + " --idle-timeout 0", "--idle-timeout: '0' is not a number of seconds above 0"),
        ("--decoder-hosts b --decoder-ports 2", "the following arguments are required: --prefiller-hosts"),
    ],
)
def test_what_must_not_start_says_so_in_one_line(flags, line, capfd) -> None:
    from kvpool.proxy.command import main

    try:
        status = main(flags.split(), prog="kvpool proxy")
    except SystemExit as end:
        status = end.code
    error = capfd.readouterr().err
    assert status == 2
    assert re.fullmatch(rf"error: .*{line}.*\n", error)


def test_the_proxy_takes_no_secret_that_the_engines_refuse() -> None:
    with pytest.raises(OptionError, match=r'^KVPOOL_SECRET="5 characters": accepted: at least 16 characters$'):
        read_flags("proxy", BASE.split(), {"KVPOOL_SECRET": "short"})
    assert read_flags("proxy", BASE.split(), {"KVPOOL_SECRET": "s" * 16}).secret == b"s" * 16


def test_a_port_that_is_taken_is_named_with_its_flag(tmp_path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        flags = f"--host 127.0.0.1 --port {port} {BASE}"
        done = subprocess.run([*KVPOOL, "proxy", *flags.split()], capture_output=True, text=True, timeout=90, env=environment())
    assert done.returncode == 2
    assert re.fullmatch(rf'error: --port="127.0.0.1:{port}": cannot be listened on: .*in use.*\n', done.stderr)


def test_the_example_files_are_in_the_package_and_in_the_repository() -> None:
    packaged = ROOT / "src" / "kvpool" / "examples" / "disaggregated_prefill_v1"
    names = {"load_balance_proxy_server_example.py", "load_balance_proxy_layerwise_server_example.py"}
    assert {path.name for path in packaged.glob("*.py")} == names
    assert (ROOT / "examples" / "disaggregated_prefill_v1").resolve() == packaged
    assert shutil.which("bash")


def test_warmup_sends_long_prompts_and_says_what_failed(tmp_path) -> None:
    async def warm(*words: str) -> tuple[int, str]:
        done = await asyncio.to_thread(CliRunner().invoke, app, ["warmup", *words])
        return done.exit_code, done.output

    async def scenario() -> None:
        async with engines() as (ps, ds):
            url = f"http://127.0.0.1:{ds[0].port}"
            status, output = await warm(url, "--devices", "2")
            assert status == 0, output
            assert "warmup: 6 of 6 requests of 599 tokens answered in" in output  # the model takes 600 tokens
            prompts = [seen.body["prompt"] for seen in ds[0].seen]
            assert [len(prompt) for prompt in prompts] == [599] * 6
            assert len({tuple(prompt) for prompt in prompts}) == 6
            assert {seen.body["max_tokens"] for seen in ds[0].seen} == {1}
            mine = tmp_path / "mine.txt"
            mine.write_text("one\n\ntwo\n")
            assert (await warm(f"{url}/v1", "--prompts", str(mine)))[0] == 0  # the address that `kvpool up` tells
            assert sorted(seen.body["prompt"] for seen in ds[0].seen[6:]) == ["one", "two"]
            assert "is not served (accepted: tiny)" in (await warm(url, "--model", "large"))[1]
            assert f"{url}/other/v1/models answers 404 Not Found" in (await warm(f"{url}/other"))[1]
            status, output = await warm(f"http://127.0.0.1:{ps[0].port}/v1/", "--requests", "1")
            assert (status, "failed: 400" in output) == (1, True)  # a prefill fake wants to be asked for KV
            await ds[0].stop()
            status, output = await warm(url)
            assert status == 2
            assert re.fullmatch(rf"error: {url}/v1/models does not answer: .*refused\n", output)
            assert (await warm("127.0.0.1:1"))[0] == 2

    run(scenario())


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--prompts EMPTY", "--prompts=.*: holds no prompts; accepted: a file with one prompt on each line"),
        ("--prompts BYTES", "--prompts=.*: is no text in UTF-8"),
        ("--prompts no/such/file", '--prompts="no/such/file": cannot be read: No such file or directory'),
        ("--prompts EMPTY --requests 50", "--requests=50: has no effect with --prompts: leave out one of the two"),
        ("--prompts EMPTY --tokens 10", "--tokens=10: has no effect with --prompts: leave out one of the two"),
        ("--prompts EMPTY --devices 2", "--devices=2: has no effect with --prompts: leave out one of the two"),
        ("--requests 5 --devices 2", "--devices=2: has no effect with --requests: leave out one of the two"),
    ],
)
def test_what_a_warmup_cannot_use_is_one_line(words, line, tmp_path) -> None:
    (tmp_path / "empty").write_text("\n \n")
    (tmp_path / "bytes").write_bytes(b"\xff\n")
    words = words.replace("EMPTY", str(tmp_path / "empty")).replace("BYTES", str(tmp_path / "bytes"))
    done = CliRunner().invoke(app, ["warmup", "http://127.0.0.1:1", *words.split()])
    assert done.exit_code == 2
    assert re.fullmatch(f"error: {line}\n", done.output)
