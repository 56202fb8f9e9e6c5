"""Set up a client: every step has a deadline, and says in one line what is wrong."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Mapping

from kvpool.options.mooncake_json import FABRIC_MEMORY, MooncakeOptions
from kvpool.stores.context import StoreContext
from kvpool.stores.mooncake import codes, ssd
from kvpool.stores.mooncake.client import Client
from kvpool.stores.mooncake.library import Library
from kvpool.stores.mooncake.listeners import open_listeners

logger = logging.getLogger(__name__)

MASTER_S = 5.0
BOUNDS = {
    "MC_RPC_TIMEOUT_MS": "4000",  # 30 s by default, for each call while the master does not answer
    "MC_RPC_CONNECT_TIMEOUT_MS": "2000",
    "MC_STORE_CLIENT_SETUP_RETRIES": "3",  # 20 by default: ten minutes
}
_GIVES_MEMORY = ("worker", "owner")
_PROTOCOLS = {"cpu": ("tcp", "rdma"), "cuda": ("tcp", "rdma"), "npu": ("ascend",)}


def check_protocol(options: MooncakeOptions, context: StoreContext) -> None:
    accepted = _PROTOCOLS[context.device]
    if options.protocol not in accepted:
        raise ValueError(
            f"protocol={options.protocol!r} cannot move KV in {context.device} memory (accepted here: {', '.join(accepted)})"
        )


def fabric_memory(options: MooncakeOptions, env: Mapping[str, str]) -> bool:
    return options.protocol == "ascend" and env.get(FABRIC_MEMORY) == "1"


def segment_bytes(options: MooncakeOptions, context: StoreContext) -> int:
    """What this process gives to the pool: nothing where it only looks things up."""
    return options.global_segment_size if context.role in _GIVES_MEMORY else 0


def reach(address: str, deadline_s: float = MASTER_S) -> str:
    """Connect to the master once: the own address on the way to it. OSError where it does not answer."""
    host, _, port = address.removeprefix("etcd://").split(",")[0].split(";")[0].rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), deadline_s) as connection:
            return str(connection.getsockname()[0])
    except (OSError, ValueError) as error:
        raise OSError(f"the Mooncake master at {address} cannot be reached: {error}") from None


def connect(library: Library, options: MooncakeOptions, context: StoreContext, env: Mapping[str, str]) -> Client:
    """A client that is set up. ValueError or OSError with the reason. With a disk tier its folder stays locked, but for errors."""
    check_protocol(options, context)
    host = reach(options.master_server_address)
    if not (options.enable_ssd_offload and segment_bytes(options, context)):
        return _client(library, options, context, env, host, {})
    disk = ssd.arguments(options, context, env)
    try:
        return _client(library, options, context, env, host, disk)
    except BaseException:
        ssd.let_go(ssd.folder_of(options, context))
        raise


def _client(
    library: Library,
    options: MooncakeOptions,
    context: StoreContext,
    env: Mapping[str, str],
    host: str,
    disk: Mapping[str, object],
) -> Client:
    extra = {**options.tenant_argument, **disk}
    buffer = 0 if fabric_memory(options, env) else options.local_buffer_size
    for name, value in BOUNDS.items():
        os.environ.setdefault(name, value)
    before = open_listeners()
    arguments = (
        host,
        options.metadata_server,
        segment_bytes(options, context),
        buffer,
        options.protocol,
        options.device_name,
        options.master_server_address,
    )
    client = library.client()
    _set_up(client, arguments, extra, f"rank {context.rank}, master {options.master_server_address}")
    opened = sorted(open_listeners() - before)
    if opened:
        logger.warning(
            "kvpool: Mooncake listens on %s, without authentication: whoever reaches these ports reads and writes the pool",
            ", ".join(opened),
        )
    return client


def _set_up(client: Client, arguments: tuple[object, ...], extra: Mapping[str, object], where: str) -> None:
    """The library's setup keeps the interpreter lock, so nothing here could end it: BOUNDS do."""
    try:
        code = client.setup(*arguments, **extra)
    except Exception as error:
        raise OSError(f"Mooncake could not be set up ({where}): {type(error).__name__}: {error}") from error
    if code != 0:
        raise OSError(f"Mooncake could not be set up ({where}): code {code}, {codes.failure(code).text}")
