"""Mooncake on this host: a master, and a process that owns the memory, so that the pool outlives the engines."""

from __future__ import annotations

import importlib.util
import json
import os
import stat
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kvpool.ops.services import processes
from kvpool.ops.services.base import LOOPBACK, Running, Service, Started
from kvpool.ops.services.ports import free_ports
from kvpool.options.scalars import read_size
from kvpool.stores.mooncake.library import installed

CONFIG = "mooncake.json"
OWNER_CONFIG = "owner.json"
READY = "owner.ready"
TENANTS = "tenant_quotas.yaml"
LEASE_S = 40.0  # longer than a load (30 s) and than the slowest transfer (33 s), also as it is measured: up to 5 % less
_STOP_S = 10.0


@dataclass(frozen=True, slots=True)
class MasterOptions:
    """What the master is started with; times in seconds. ``client_ttl_s``: how long the memory of a dead client is believed to
    be there. ``discard_s``: when a key that a dead writer left half-written is free again."""

    lease_s: float = LEASE_S
    client_ttl_s: int = 5
    discard_s: int = 10
    eviction_high: float = 0.9
    eviction_ratio: float = 0.1
    offload: bool = False
    more: tuple[str, ...] = ()


@dataclass(slots=True)
class MooncakeService(Service):
    """``dram_bytes`` is what the owner gives, ``ssd`` a directory for its disk tier; with 0 there is no owner, and each engine rank
    gives ``engine_dram_bytes``. ``tenants`` maps names to quotas ("200GB") and switches strict mode on, in which clients of this
    service use the first of them."""

    dram_bytes: int = 1 << 30
    engine_dram_bytes: int = 0
    tenants: Mapping[str, str] = field(default_factory=dict)
    ssd: Path | None = None
    master: MasterOptions = field(default_factory=MasterOptions)
    local_buffer_bytes: int = 16 << 20
    env: Mapping[str, str] = field(default_factory=dict)  # more variables for the processes
    host: str = LOOPBACK  # where the master listens, and the owner is reached
    backend: str = "mooncake"

    def start(self, folder: Path, deadline_s: float) -> Started:
        self._check(folder)
        folder.mkdir(parents=True, exist_ok=True)
        end = time.monotonic() + deadline_s
        port, metrics = free_ports(2, self.host)
        address = f"{self.host}:{port}"
        self._write_files(folder, address)
        running: list[Running] = []
        try:
            running.append(processes.spawn("master", self.master_command(folder, port, metrics), folder, self._environment()))
            processes.wait_until(lambda: processes.listens(self.host, port), running, end - time.monotonic())
            if self.dram_bytes:
                running.append(processes.spawn("owner", self.owner_command(folder), folder, self._environment()))
                processes.wait_until((folder / READY).exists, running, end - time.monotonic())
        except BaseException:
            processes.stop_all(running, _STOP_S)
            raise
        started = Started(
            self.backend,
            str(folder),
            running,
            {"MOONCAKE_CONFIG_PATH": str(folder / CONFIG)},
            {"master": address, "metrics": f"http://{self.host}:{metrics}"},
            self._notes(),
        )
        processes.save(started)
        return started

    def stop(self, folder: Path, deadline_s: float) -> list[str]:
        started = processes.load(folder, self.backend)
        if started is None:
            return []
        killed = processes.stop_all(started.processes, deadline_s)
        (folder / READY).unlink(missing_ok=True)
        (folder / processes.STATE).unlink(missing_ok=True)
        return killed

    def status(self, folder: Path) -> dict[str, str]:
        started = processes.load(folder, self.backend)
        if started is None:
            return {}
        host, _, port = started.addresses["master"].rpartition(":")
        states = {}
        for process in started.processes:
            answers = processes.listens(host, int(port)) if process.name == "master" else _owner_is_ready(folder, process)
            states[process.name] = "dead" if not processes.alive(process) else "ready" if answers else "starting"
        return states

    def master_command(self, folder: Path, port: int, metrics: int) -> list[str]:
        """How the master is started; also to start it again after it was killed."""
        given = self.master
        command = [
            _master_binary(),
            f"--rpc_port={port}",
            f"--rpc_address={self.host}",
            f"--metrics_port={metrics}",
            f"--metrics_host={self.host}",
            f"--default_kv_lease_ttl={int(given.lease_s * 1000)}",
            f"--client_ttl={given.client_ttl_s}",
            f"--put_start_discard_timeout_sec={given.discard_s}",
            f"--put_start_release_timeout_sec={given.discard_s * 2}",
            f"--eviction_high_watermark_ratio={given.eviction_high}",
            f"--eviction_ratio={given.eviction_ratio}",
            f"--enable_offload={'true' if given.offload or self.ssd is not None else 'false'}",
        ]
        if self.tenants:
            command += [
                "--enable_multi_tenants=true",
                "--tenant_quota_connector_type=file",
                f"--tenant_quota_connector_uri={folder / TENANTS}",
            ]
        return [*command, *given.more]

    def owner_command(self, folder: Path) -> list[str]:
        return [sys.executable, "-m", "kvpool.ops.services.mooncake_owner", str(folder / OWNER_CONFIG), str(folder / READY)]

    def _environment(self) -> dict[str, str]:
        """Without what would win over the files of this service."""
        names = ("MOONCAKE_MASTER", "MOONCAKE_GLOBAL_SEGMENT_SIZE")
        kept = {name: value for name, value in os.environ.items() if name not in names}
        source = str(Path(__file__).resolve().parents[3])
        paths = [source, *filter(None, [kept.get("PYTHONPATH")])]
        return {**kept, "PYTHONPATH": os.pathsep.join(paths), **self.env}

    def _check(self, folder: Path) -> None:
        processes.refuse_running(folder)
        for tenant, quota in self.tenants.items():
            try:
                read_size(quota)
            except ValueError:
                raise ValueError(f"the quota of tenant {tenant} is {quota!r} (accepted: a size such as 200GB)") from None
            if not tenant.strip() or any(character in tenant for character in "\n\"'#:{}[]"):
                raise ValueError(f"the tenant name {tenant!r} (accepted: text without quotes, colons and brackets)")

    def _write_files(self, folder: Path, address: str) -> None:
        (folder / READY).unlink(missing_ok=True)
        shared: dict[str, object] = {
            "metadata_server": "P2PHANDSHAKE",
            "protocol": "tcp",
            "device_name": "",
            "master_server_address": address,
            "local_buffer_size": self.local_buffer_bytes,
        }
        if self.tenants:
            shared["tenant_id"] = next(iter(self.tenants))
            lines = [f"  - name: {name}\n    quota: {quota}\n" for name, quota in self.tenants.items()]
            (folder / TENANTS).write_text("version: 1\n\ntenants:\n" + "".join(lines))
        owner = {**shared, "global_segment_size": self.dram_bytes}
        if self.ssd is not None:
            owner |= {"enable_ssd_offload": True, "ssd_offload_path": str(self.ssd)}
        (folder / OWNER_CONFIG).write_text(json.dumps(owner, indent=2))
        given = 0 if self.dram_bytes else self.engine_dram_bytes
        (folder / CONFIG).write_text(json.dumps({**shared, "global_segment_size": given}, indent=2))

    def _notes(self) -> list[str]:
        who = "the owner's data port listens" if self.dram_bytes else "the data ports of engines listen"
        notes = [f"{who} on all interfaces without authentication: use it on a private host only"]
        if self.tenants:
            notes.append(f"strict tenants: {', '.join(self.tenants)}; {CONFIG} uses the first")
        return notes


def _owner_is_ready(folder: Path, process: Running) -> bool:
    try:
        return (folder / READY).read_text() == str(process.pid)
    except OSError:
        return False


def _master_binary() -> str:
    """The program in the wheel; OSError where it is not there."""
    try:
        installed("cpu")
    except ValueError as error:
        raise OSError(str(error)) from None
    found = importlib.util.find_spec("mooncake")
    for place in (found.submodule_search_locations or []) if found is not None else []:
        program = Path(place) / "mooncake_master"
        if program.exists():
            if not os.access(program, os.X_OK):
                program.chmod(program.stat().st_mode | stat.S_IXUSR)
            return str(program)
    raise OSError("the installed Mooncake has no mooncake_master")
