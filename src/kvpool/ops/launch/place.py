"""The place of a launch on this host: free ports, folders that go with it, CPUs, devices, and a secret."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from kvpool.devices.affinity import usable_cpus
from kvpool.ops.launch.abandoned import PREFIX, SHARED_MEMORY, owned
from kvpool.ops.launch.options import LaunchOptions
from kvpool.ops.launch.plan import HERE, Place
from kvpool.ops.services.ports import quiet_ports
from kvpool.options.errors import OptionError
from kvpool.options.probe import HOST, Probe

VISIBLE = "CUDA_VISIBLE_DEVICES"


@contextmanager
def own_place(options: LaunchOptions) -> Iterator[Place]:
    """Folders are there until the end of the block. OptionError for a port that is taken or devices that are missing."""
    ports, devices = choose_ports(options), choose_devices(options)
    with ExitStack() as stack:
        folder = _folder(stack, None)
        memory = SHARED_MEMORY
        shared = _folder(stack, str(memory)) if memory.is_dir() and os.access(memory, os.W_OK) else folder
        stack.enter_context(owned(Path(shared)))
        secret = os.environ.get("KVPOOL_SECRET") or secrets.token_hex(16)
        yield Place(folder, shared, ports, secret, sys.executable, usable_cpus(), devices)


def shown_place(options: LaunchOptions) -> Place:
    """The same with words in place of folders and secret, which only a launch makes."""
    return Place("FOLDER", "SHARED", choose_ports(options), "SECRET", sys.executable, usable_cpus(), choose_devices(options))


def choose_ports(options: LaunchOptions) -> dict[str, int]:
    """Ports that were given, found free, and free ones for the others. All are held until the last is known."""
    hosts = {flag: options.host if flag == "--port" else HERE for flag in options.port_flags}
    with ExitStack() as held:
        given = {flag: port for flag, port in options.port_flags.items() if port is not None}
        for flag, port in given.items():
            _hold(held, hosts[flag], port, flag)
        return {flag: given.get(flag) or _free(held, hosts[flag], flag) for flag in hosts}


def _free(held: ExitStack, host: str, flag: str) -> int:
    """A port that stays free until an engine, which starts slowly, listens on it: nobody else gets one of these by chance."""
    for port in quiet_ports():
        with suppress(OptionError):
            return _hold(held, host, port, flag)
    return _hold(held, host, None, flag)


def _hold(held: ExitStack, host: str, port: int | None, flag: str) -> int:
    try:
        address = socket.getaddrinfo(host, port or 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except OSError as error:
        raise OptionError("--host", host, f"cannot be resolved: {error.strerror}") from None
    with ExitStack() as own:
        probe = own.enter_context(socket.socket(address[0], socket.SOCK_STREAM))
        try:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # what a launch before has used can be used again at once
            probe.bind(address[4])
            probe.listen(1)
        except OSError as error:
            if port is None:
                raise OptionError("--host", host, f"cannot be listened on: {error.strerror}") from None
            raise OptionError(flag, port, f"cannot be listened on ({error.strerror}): choose another, or none") from None
        held.push(own.pop_all())
    return int(probe.getsockname()[1])


def choose_devices(options: LaunchOptions, probe: Probe = HOST, env: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """The GPUs of this host, as far as CUDA_VISIBLE_DEVICES shows them; none on CPUs. OptionError where there are too few."""
    if options.device != "cuda":
        return ()
    shown = env.get(VISIBLE)
    if shown is None:
        found = tuple(map(str, sorted(probe.devices("nvidia"))))
    else:
        found = tuple(name.strip() for name in shown.split(",") if name.strip())
    needed = len(options.engines) * options.tp
    if len(found) < needed:
        whose = "this host" if shown is None else VISIBLE
        reason = f"{len(options.engines)} engines need {needed} GPUs, and {whose} shows {len(found)}"
        raise OptionError("--tensor-parallel-size", options.tp, reason)
    return found


def _folder(stack: ExitStack, parent: str | None) -> str:
    made = tempfile.mkdtemp(prefix=PREFIX, dir=parent)
    stack.callback(shutil.rmtree, made, ignore_errors=True)
    return made
