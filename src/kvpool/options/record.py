"""Which pool an engine uses, in three words that engines compare: kind, endpoint and tenant."""

from __future__ import annotations

from dataclasses import dataclass, fields

from kvpool.options.addresses import host_of, port_of
from kvpool.options.ascend_store import AscendStoreOptions
from kvpool.options.fields import OptionModel
from kvpool.options.memcache_conf import LocalConf
from kvpool.options.mooncake_json import MooncakeOptions


@dataclass(frozen=True, slots=True)
class StoreRecord:
    """``endpoint`` is what all engines of one pool have in common; "" where no such address is known to a client."""

    kind: str
    endpoint: str = ""
    tenant: str = ""


def store_record(backend: str, options: OptionModel) -> StoreRecord:
    """The record of a backend; ``options`` are those of its own file, or for local those of the connector.

    Each host of a Yuanrong pool has a worker of its own, and a client knows only that one: there is no endpoint to compare."""
    if isinstance(options, MooncakeOptions):
        return StoreRecord(backend, _plain(options.master_server_address), options.tenant_id)
    if isinstance(options, LocalConf):
        return StoreRecord(backend, _plain(options.meta_service_url))
    if isinstance(options, AscendStoreOptions):
        return StoreRecord(backend, f"{options.local_pool_root or ''}/{options.local_pool_name}")
    return StoreRecord(backend)


def difference(mine: StoreRecord, theirs: StoreRecord) -> str:
    """One line naming the fields that differ; "" where none does. An endpoint that one side does not know is not compared."""
    if mine.kind != theirs.kind:
        return f"the kind of store differs: {mine.kind} here, {theirs.kind} there"
    parts = []
    for name in [field.name for field in fields(StoreRecord)]:
        here, there = getattr(mine, name), getattr(theirs, name)
        if here != there and here and there:
            parts.append(f"{name} ({here} here, {there} there)")
    return f"the {mine.kind} stores differ in {' and '.join(parts)}" if parts else ""


def _plain(address: str) -> str:
    """An address in one spelling, so that names of loopback do not differ."""
    if address.count("://") and not address.startswith(("tcp://", "tls://")):
        return address.lower()
    host = host_of(address)
    return f"{'127.0.0.1' if host == 'localhost' else host}:{port_of(address)}"
