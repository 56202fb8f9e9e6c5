"""The flags of `dscli start` for a Yuanrong worker, and whether workers fit one another and the clients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated

from pydantic import Field

from kvpool.options.addresses import is_wildcard, only_here
from kvpool.options.amounts import huge_pages
from kvpool.options.commands import Command
from kvpool.options.configfile import read_text
from kvpool.options.deployment import Deployment
from kvpool.options.errors import UNSET, OptionError
from kvpool.options.fields import OptionModel, Reading, read_fields
from kvpool.options.jsonfile import read_json
from kvpool.options.scalars import ADDRESS, Address, Bool, integer, text
from kvpool.options.yuanrong_json import YuanrongOptions

SWITCHES = ("w", "c", "a", "worker_args", "l", "localalloc", "enable_ums")
NUMA = ("cpunodebind", "physcpubind", "interleave", "preferred", "membind", "localalloc", "N", "C", "i", "p", "m", "l")
OWN_OPTIONS = ("timeout", "t", "datasystem_home_dir", "d", "enable_ums", *NUMA)
DISCOVERY = ("coordinator_address", "etcd_address", "metastore_address")
Text = Annotated[str | None, text("a string", r"[^\x00-\x1f]*")]


class WorkerFlags(OptionModel):
    """Flags of a worker that others depend on; the rest goes to the library unchecked."""

    worker_address: Address = Field(
        "127.0.0.1:31501", description="Where the worker is reached, from all workers; worker_addr of the local clients."
    )
    coordinator_address: Annotated[str | None, ADDRESS] = Field(None, description="Discovery by a coordinator.")
    etcd_address: Text = Field(None, description="Discovery by etcd.")
    metastore_address: Annotated[str | None, ADDRESS] = Field(None, description="Discovery by the worker's own metastore.")
    log_dir: Text = Field(None, description="Directory of its logs; absolute.")
    shared_memory_size_mb: Annotated[int, integer(1)] = Field(1024, description="Memory of the pool on this host in MiB.")
    arena_per_tenant: Annotated[int | None, integer(1)] = Field(None, description="1 with huge pages and remote H2D.")
    enable_huge_tlb: Bool = Field(False, description="Huge pages of 2 MiB; reserve them first.")
    enable_fallocate: Bool = Field(True, description="false with huge pages.")
    remote_h2d_device_ids: Text = Field(None, description="NPUs for remote H2D, as 0,1,2,3; empty switches it off.")
    remote_h2d_link_type: Annotated[str, text('"ROCE" or "HCCS", in capitals', "ROCE|HCCS")] = Field(
        "ROCE", description="HCCS where clients use HIXL, ROCE where they use P2P_TRANSFER."
    )
    remote_h2d_hccs_buffer_pool: Annotated[str, text('"<count>:<size>"', "[0-9]+:[0-9]+")] = Field(
        "4:8", description="Buffer pool of HIXL; HCCS only."
    )


def read_worker(command: Command, where: str, deployment: Deployment) -> Reading[WorkerFlags] | None:
    """The flags of a worker; None for a command that starts none. OptionError for what the worker would refuse or misread."""
    file = command.flags.get("f") or command.flags.get("worker_config_path")
    if file:
        return _read(_file_flags(file), file, deployment)
    order = command.order
    start = next((index for index, name in enumerate(order) if name in ("w", "a", "worker_args")), None)
    if start is None:
        return None
    if late := [name for name in order[start + 1 :] if name in OWN_OPTIONS]:
        raise OptionError(
            f"--{late[0]}", UNSET, f"stands after -{order[start]}, which takes all that follows: move it in front", where=where
        )
    if command.joined:
        raise OptionError(f"--{command.joined[0]}=", UNSET, "is not split at the =: write the value after a blank", where=where)
    return _read(command.flags, where, deployment)


def _file_flags(path: str) -> dict[str, object]:
    """The flags in a file of `dscli start -f`, an object of {"value": …} by flag."""
    entries = read_json(read_text(path, "--worker_config_path"), path)
    return {key: entry["value"] for key, entry in entries.items() if isinstance(entry, dict) and entry.get("value") != ""}


def _read(flags: Mapping[str, object], where: str, deployment: Deployment) -> Reading[WorkerFlags]:
    known = WorkerFlags.keys()
    reading = read_fields(WorkerFlags, {key: value for key, value in flags.items() if key in known}, origin=where, where=where)
    check_discovery(reading.options, where)
    return Reading(reading.options, [*reading.warnings, *_check_memory(reading.options, where, deployment)], reading.sources)


def check_discovery(flags: WorkerFlags, where: str) -> None:
    """OptionError unless exactly one way of discovery is set, on an address that fits the worker's own."""
    chosen = [name for name in DISCOVERY if getattr(flags, name)]
    if len(chosen) != 1:
        found = "none is set" if not chosen else f"{' and '.join(chosen)} are set"
        raise OptionError(
            "worker_address", flags.worker_address, f"needs exactly one of {', '.join(DISCOVERY)}; {found}", where=where
        )
    elsewhere = not only_here(str(getattr(flags, chosen[0])))
    if is_wildcard(flags.worker_address) or (elsewhere and only_here(flags.worker_address)):
        reason = f"other workers cannot reach it: give the address of this host ({chosen[0]} is {getattr(flags, chosen[0])})"
        raise OptionError("worker_address", flags.worker_address, reason, where=where)


def _check_memory(flags: WorkerFlags, where: str, deployment: Deployment) -> list[str]:
    if flags.enable_huge_tlb and flags.enable_fallocate:
        raise OptionError("enable_fallocate", True, "does not go with enable_huge_tlb: set --enable_fallocate false", where=where)
    if flags.remote_h2d_device_ids:
        if not flags.enable_huge_tlb:
            raise OptionError("remote_h2d_device_ids", flags.remote_h2d_device_ids, "needs --enable_huge_tlb true", where=where)
        if flags.arena_per_tenant != 1:
            raise OptionError("remote_h2d_device_ids", flags.remote_h2d_device_ids, "needs --arena_per_tenant 1", where=where)
        if flags.remote_h2d_link_type == "HCCS" and only_here(flags.worker_address):
            reason = "is also the address of HIXL: give one that other hosts reach"
            raise OptionError("worker_address", flags.worker_address, reason, where=where)
    warnings = []
    pages = deployment.host.huge_pages()
    needed = huge_pages(flags.shared_memory_size_mb << 20)
    if flags.enable_huge_tlb and pages is not None and pages < needed:
        warnings.append(f"{where}: enable_huge_tlb needs {needed} huge pages of 2 MiB, this host has reserved {pages}")
    if flags.log_dir and not flags.log_dir.startswith("/"):
        warnings.append(f"{where}: log_dir={flags.log_dir} is relative: the logs lie wherever the worker is started")
    return warnings


def check_workers(workers: Sequence[tuple[str, WorkerFlags]], clients: Sequence[tuple[str, YuanrongOptions]]) -> None:
    """OptionError where workers do not fit one another, or a client does not fit the workers."""
    for index, (where, worker) in enumerate(workers):
        if len(workers) > 1 and only_here(worker.worker_address):
            reason = f"is loopback or a wildcard, but there are {len(workers)} workers: each needs an address that the others reach"
            raise OptionError("worker_address", worker.worker_address, reason, where=where)
        for other_where, other in workers[:index]:
            if other.worker_address == worker.worker_address:
                raise OptionError("worker_address", worker.worker_address, f"is that of {other_where} too", where=where)
            for name in DISCOVERY:
                if getattr(other, name) != getattr(worker, name):
                    raise OptionError(
                        name, getattr(worker, name), f"differs from {getattr(other, name)} of {other_where}", where=where
                    )
    for path, client in clients:
        if workers:
            _check_client(client, path, [worker for _, worker in workers])


def _check_client(client: YuanrongOptions, path: str, workers: Sequence[WorkerFlags]) -> None:
    own = next((worker for worker in workers if worker.worker_address == client.worker_addr), None)
    if own is None:
        addresses = ", ".join(worker.worker_address for worker in workers)
        raise OptionError("worker_addr", client.worker_addr, f"no worker has this address, but {addresses}", where=path)
    if not client.enable_remote_h2d:
        return
    if not own.remote_h2d_device_ids:
        raise OptionError("enable_remote_h2d", True, "but its worker runs without --remote_h2d_device_ids", where=path)
    link = {"HIXL": "HCCS", "P2P_TRANSFER": "ROCE"}[client.remote_h2d_transport_backend]
    if own.remote_h2d_link_type != link:
        reason = f"needs workers with --remote_h2d_link_type {link}, not {own.remote_h2d_link_type}"
        raise OptionError("remote_h2d_transport_backend", client.remote_h2d_transport_backend, reason, where=path)
