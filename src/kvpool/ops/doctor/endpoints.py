"""Where the configuration says that services answer, and which ports of this host its engines take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress

from kvpool.ops.doctor.need import Endpoint, Role
from kvpool.options.cross_check import Parts
from kvpool.options.errors import OptionError
from kvpool.options.fields import OptionModel
from kvpool.options.memcache_conf import LocalConf
from kvpool.options.mooncake_json import MooncakeOptions
from kvpool.options.prefill_decode import PullOptions
from kvpool.options.resources import read_resources
from kvpool.options.transfer import ParsedConnector
from kvpool.options.yuanrong_json import YuanrongOptions


def services(conf: OptionModel | None, parts: Parts) -> tuple[Endpoint, ...]:
    """What must answer before an engine starts. Addresses in etcd are not followed."""
    found: list[Endpoint] = []
    if isinstance(conf, MooncakeOptions) and not conf.master_server_address.startswith("etcd://"):
        found.append(Endpoint("mooncake_master", conf.master_server_address))
    if isinstance(conf, LocalConf):
        found.append(Endpoint("MemCache meta service", conf.meta_service_url))
        found.append(Endpoint("MemCache config store", conf.config_store_url))
    if isinstance(conf, YuanrongOptions):
        found.append(Endpoint("Yuanrong worker", conf.worker_addr))
    for worker in parts.workers.values():
        found.append(Endpoint("Yuanrong worker", worker.worker_address))
        found += [
            Endpoint(what, address)
            for what, address in (("Yuanrong coordinator", worker.coordinator_address), ("metastore", worker.metastore_address))
            if address is not None
        ]
        found += [Endpoint("etcd", address.strip()) for address in (worker.etcd_address or "").split(",") if address.strip()]
    return tuple(dict.fromkeys(found))


def listens(pull: ParsedConnector | None, role: Role, env: Mapping[str, str], further: Sequence[int]) -> tuple[Endpoint, ...]:
    """Ports that engines of this host take: of prefill for decode, of HIXL where the environment sets one, and ``further``."""
    found: list[Endpoint] = []
    if pull is not None and isinstance(pull.options, PullOptions) and role != "decode":
        side = pull.options.prefill
        step = side.tp_size * side.pp_size
        found += [
            Endpoint(f"kv_port of prefill, data-parallel rank {rank}", f":{pull.kv_port + rank * step}")
            for rank in range(side.dp_size)
        ]
    with suppress(OptionError):
        fields = read_resources(env).options
        for what, port in (("HIXL", fields.listen_port), ("HIXL of the store", fields.store_listen_port)):
            found += [] if port is None else [Endpoint(f"listen_port of {what}", f":{port}")]
    found += [Endpoint("--port", f":{port}") for port in further]
    return tuple(dict.fromkeys(found))
