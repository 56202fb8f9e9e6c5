"""openYuanrong datasystem on this host: one worker, with its built-in metastore, an etcd, or a coordinator where dscli has one."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from kvpool.ops.services import processes
from kvpool.ops.services.base import LOOPBACK, Running, Service, Started
from kvpool.ops.services.ports import free_port
from kvpool.stores.yuanrong import library
from kvpool.stores.yuanrong.link import Link
from kvpool.stores.yuanrong.messages import Settings

Discovery = Literal["metastore", "etcd", "coordinator"]
CONFIG = "yuanrong.json"
SOCKETS = "kvpool-yr-"  # folders of unix sockets: their paths may have 80 characters, so they do not lie in the service's
_HELP_S = 30.0


@dataclass
class YuanrongService(Service):
    """``memory_mb`` is reserved and touched at the start, so that the first puts are as fast as later ones."""

    memory_mb: int = 1024
    discovery: Discovery = "metastore"
    connect_timeout_ms: int = 3000
    request_timeout_ms: int = 1000
    worker_flags: dict[str, str] = field(default_factory=dict)
    host: str = LOOPBACK
    sockets_in: str | None = None  # the temporary folder
    backend: str = "yuanrong"

    def __post_init__(self) -> None:
        if self.discovery not in get_args(Discovery):
            raise ValueError(f"discovery {self.discovery!r} is unknown (accepted: {', '.join(get_args(Discovery))})")
        if self.memory_mb < 1:
            raise ValueError(f"a worker of {self.memory_mb} MB cannot store anything (accepted: at least 1)")

    def start(self, folder: Path, deadline_s: float) -> Started:
        library.require_installed()
        processes.refuse_running(folder)
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        end = time.monotonic() + deadline_s
        running: list[Running] = []
        sockets = tempfile.mkdtemp(prefix=SOCKETS, dir=self.sockets_in)
        try:
            started = self._start(folder, sockets, end, running)
        except BaseException:
            processes.stop_all(running, 5.0)
            shutil.rmtree(sockets, ignore_errors=True)
            raise
        processes.save(started)
        return started

    def _start(self, folder: Path, sockets: str, end: float, running: list[Running]) -> Started:
        addresses: dict[str, str] = {}
        flags = self._discovery(folder, end, running, addresses)
        address = f"{self.host}:{free_port(self.host)}"
        addresses |= {"worker": address, "unix sockets": sockets}
        home = folder / "worker"
        flags |= {
            "worker_address": address,
            "shared_memory_size_mb": str(self.memory_mb),
            "shared_memory_populate": "true",
            "arena_per_tenant": "1",  # populate needs this and the next
            "enable_fallocate": "false",
            "log_dir": str(home / "logs"),
            "unix_domain_socket_dir": sockets,
            "rocksdb_write_mode": "none",  # what it would write to disk says where objects are that are gone with the worker
            "client_dead_timeout_s": "60",  # until then the room of a killed client's unpublished objects is lost
            "sc_regular_socket_num": "0",
            "sc_stream_socket_num": "0",
        }
        flags |= self.worker_flags
        command = [dscli(), "start", "-d", str(home), "-w", *arguments(flags)]
        starter = processes.spawn("dscli", command, folder)
        worker = _worker(starter, address, end)
        running.append(worker)
        processes.wait_until(lambda: processes.listens(*_split(address)), [worker], end - time.monotonic())
        answers(address, end - time.monotonic())
        content = {
            "worker_addr": address,
            "connect_timeout_ms": self.connect_timeout_ms,
            "request_timeout_ms": self.request_timeout_ms,
        }
        (folder / CONFIG).write_text(json.dumps(content, indent=4) + "\n")
        env = {"YR_CONFIG_PATH": str(folder / CONFIG), library.LOG_DIR: str(folder / "client-logs")}
        notes = [f"whoever reaches {address} can read and change what is stored: the datasystem knows no authentication here"]
        return Started("yuanrong", str(folder), running, env, addresses, notes)

    def _discovery(self, folder: Path, end: float, running: list[Running], addresses: dict[str, str]) -> dict[str, str]:
        """Start what workers find each other by; the worker's flags for it."""
        address = f"{self.host}:{free_port(self.host)}"
        addresses[self.discovery] = address
        if self.discovery == "metastore":
            return {"start_metastore_service": "true", "metastore_address": address}
        if self.discovery == "etcd":
            running.append(_etcd(folder, address, end))
            return {"etcd_address": address}
        if not has_coordinator():
            raise ValueError(
                f"the dscli of {library.DISTRIBUTION} {library.version()} has no coordinator (dscli start -c):"
                " use the metastore or etcd"
            )
        flags = {"coordinator_address": address, "log_dir": str(folder / "coordinator" / "logs")}
        starter = processes.spawn("dscli-coordinator", [dscli(), "start", "-c", *arguments(flags)], folder)
        running.append(_found(starter, "coordinator", f"coordinator_address={address}", end))
        processes.wait_until(lambda: processes.listens(*_split(address)), running, end - time.monotonic())
        return {"coordinator_address": address}

    def stop(self, folder: Path, deadline_s: float) -> list[str]:
        started = processes.load(folder, self.backend)
        if started is None:
            return []
        killed = processes.stop_all(started.processes, deadline_s)
        sockets = Path(started.addresses.get("unix sockets", ""))
        if sockets.name.startswith(SOCKETS):
            shutil.rmtree(sockets, ignore_errors=True)
        (folder / processes.STATE).unlink(missing_ok=True)
        return killed

    def status(self, folder: Path) -> dict[str, str]:
        started = processes.load(folder, self.backend)
        if started is None:
            return {}
        states = {}
        for process in started.processes:
            address = started.addresses.get(process.name, "")
            listening = bool(address) and processes.listens(*_split(address))
            states[process.name] = "dead" if not processes.alive(process) else "ready" if listening else "starting"
        return states


def dscli() -> str:
    """The command of the installed package, beside this interpreter or on the path. ValueError where there is none."""
    beside = Path(sys.executable).with_name("dscli")
    found = str(beside) if beside.exists() else shutil.which("dscli")
    if found is None:
        raise ValueError(f"dscli is not found: pip install {library.DISTRIBUTION}")
    return found


def has_coordinator() -> bool:
    """Whether ``dscli start`` knows -c."""
    shown = subprocess.run([dscli(), "start", "--help"], capture_output=True, text=True, timeout=_HELP_S, check=False)
    return "--coordinator_args" in shown.stdout


def arguments(flags: dict[str, str]) -> list[str]:
    return [part for name, value in flags.items() for part in (f"--{name}", value)]


def answers(address: str, deadline_s: float) -> None:
    """Until a real client has looked something up. OSError where none can in time."""
    host, port = _split(address)
    end = time.monotonic() + deadline_s
    link = Link(Settings(host, port, connect_ms=1000, request_ms=1000), slowest_s=2.0, patience_s=5.0)
    try:
        while True:
            try:
                link.open(max(end - time.monotonic(), 0.1))
                link.ask("exists", 2.0, names=["kvpool"])
            except OSError as error:
                if time.monotonic() > end:
                    raise OSError(f"the worker at {address} listens, but answers no client: {error}") from None
                time.sleep(0.2)
            else:
                return
    finally:
        link.close()


def _worker(starter: Running, address: str, end: float) -> Running:
    return _found(starter, "worker", f"worker_address={address}", end)


def _found(starter: Running, name: str, argument: str, end: float) -> Running:
    """The process that dscli started: known by an argument that nobody else has. What dscli says in the end counts for nothing."""
    while True:
        for pid in _pids_with(argument):
            return Running(name, pid, processes.start_time(pid), starter.log)
        if not processes.alive(starter) and not _pids_with(argument):
            raise processes.StartError(f"dscli ended without a {name}: {processes.last_line(starter)}", starter.log)
        if time.monotonic() > end:
            processes.stop_all([starter], 2.0)
            raise processes.StartError(f"dscli started no {name} in time", starter.log)
        time.sleep(0.05)


def _pids_with(argument: str) -> list[int]:
    """Processes with an argument ``-…argument``, in one word, as dscli passes them on."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if any(word.lstrip(b"-") == argument.encode() and word.startswith(b"-") for word in words):
            found.append(int(entry.name))
    return found


def _etcd(folder: Path, address: str, end: float) -> Running:
    binary = shutil.which("etcd")
    if binary is None:
        raise ValueError("etcd is not found: install it (Debian and Ubuntu: apt-get install etcd-server)")
    host, _ = _split(address)
    client, peer = f"http://{address}", f"http://{host}:{free_port(host)}"
    options: Sequence[str] = (
        f"--data-dir={folder / 'etcd'}",
        f"--listen-client-urls={client}",
        f"--advertise-client-urls={client}",
        f"--listen-peer-urls={peer}",
        f"--initial-advertise-peer-urls={peer}",
        f"--initial-cluster=default={peer}",
    )
    process = processes.spawn("etcd", [binary, *options], folder)
    try:
        processes.wait_until(lambda: processes.listens(*_split(address)), [process], end - time.monotonic())
    except BaseException:
        processes.stop_all([process], 2.0)
        raise
    return process


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)
