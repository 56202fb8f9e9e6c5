"""The files of a store's service on a production host: its configuration, and the scripts that start it."""

from __future__ import annotations

import json
from dataclasses import dataclass

from kvpool.ops.launch.npu_setup import libraries, toolkit
from kvpool.ops.launch.series import GIB, Series
from kvpool.ops.launch.shell import command_lines, exports
from kvpool.ops.services.memcache_files import LOCAL, Addresses, local_values, meta_values, text_of
from kvpool.ops.services.mooncake import LEASE_S
from kvpool.options.amounts import mooncake_host_nbytes
from kvpool.options.mooncake_json import MooncakeOptions

MASTER, MASTER_METRICS = 50088, 9003
META, CONFIG_STORE, META_METRICS = 5000, 6000, 9004  # the library's own choice for metrics, 8000, is the proxy's
WORKER, METASTORE = 31501, 2379
FOLDER = "/etc/kvpool"


@dataclass(frozen=True, slots=True)
class File:
    """``name`` is relative; scripts (``*.sh``) are made executable."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class PoolOnHost:
    """``service_host`` is where master, MetaService or metastore is, ``host`` a host of engines, with ``nic``. ``dram``: bytes that
    each host gives; ``ranks``: engine ranks of a host; ``separated``: an owner gives the memory, not the ranks."""

    backend: str
    series: Series
    service_host: str
    host: str
    nic: str
    dram: int
    ranks: int
    separated: bool

    @property
    def per_rank(self) -> int:
        """Whole GB on NPUs, which map memory by GB."""
        share = self.dram // self.ranks
        return share // GIB * GIB if self.series.npu else share

    @property
    def host_nbytes(self) -> int:
        """What the pool takes of a host: with Mooncake on NPUs also the buffer that each rank has by default."""
        if self.backend == "mooncake" and self.series.npu:
            return mooncake_host_nbytes(self.ranks, self.per_rank, 0, MooncakeOptions.model_fields["local_buffer_size"].default)
        return self.dram

    @property
    def variables(self) -> dict[str, str]:
        """What engines need to find their configuration."""
        return {
            "mooncake": {"MOONCAKE_CONFIG_PATH": f"{FOLDER}/mooncake.json"},
            "memcache": {"MMC_LOCAL_CONFIG_PATH": f"{FOLDER}/mmc-local.conf"},
            "yuanrong": {"YR_CONFIG_PATH": f"{FOLDER}/yuanrong.json", "DATASYSTEM_CLIENT_LOG_DIR": "/var/log/yuanrong/client"},
        }.get(self.backend, {})

    def files(self) -> list[File]:
        if self.backend == "mooncake":
            return self._mooncake()
        if self.backend == "memcache":
            return self._memcache()
        return self._yuanrong() if self.backend == "yuanrong" else []

    def _mooncake(self) -> list[File]:
        shared: dict[str, object] = {
            "metadata_server": "P2PHANDSHAKE",
            "protocol": self.series.mooncake_protocol,
            "device_name": "",
            "master_server_address": f"{self.service_host}:{MASTER}",
        }
        if not self.series.npu:
            shared["local_buffer_size"] = 64 << 20
        given = {"global_segment_size": 0 if self.separated else self.per_rank}
        files = [
            File("mooncake.json", _json({**shared, **given})),
            File("run_master.sh", script("The master: on one host only, before everything else.", command_lines(self._master()))),
        ]
        if self.separated:
            owner = ["python", "-m", "kvpool.ops.services.mooncake_owner", f"{FOLDER}/owner.json", "/run/kvpool/owner.ready"]
            files.append(File("owner.json", _json({**shared, "global_segment_size": self.dram})))
            words = "The owner of this host's memory: on every host, after the master and before engines."
            files.append(File("run_owner.sh", script(words, "mkdir -p /run/kvpool\nexec " + command_lines(owner))))
        return files

    def _master(self) -> list[str]:
        return [
            "exec",
            "mooncake_master",
            f"--rpc_port={MASTER}",
            f"--rpc_address={self.service_host}",
            f"--metrics_port={MASTER_METRICS}",
            f"--metrics_host={self.service_host}",
            "--eviction_high_watermark_ratio=0.9",
            "--eviction_ratio=0.1",
            f"--default_kv_lease_ttl={int(LEASE_S * 1000)}",
            "--enable_offload=false",
        ]

    def _memcache(self) -> list[File]:
        where = Addresses(*(f"{self.service_host}:{port}" for port in (META, CONFIG_STORE, META_METRICS)))
        engine = 0 if self.separated else self.per_rank
        largest = self.dram if self.separated else self.per_rank
        meta = {**meta_values(where), "ock.mmc.log_path": "/var/log/memcache"}
        setup = toolkit(self.series) + libraries(self.series, "memcache")  # without them the library cannot be imported
        run = f"{setup}export MMC_META_CONFIG_PATH={FOLDER}/mmc-meta.conf\nmkdir -p /var/log/memcache\n"
        run += "exec python -c 'from memcache_hybrid import MetaService; MetaService.main()'\n"
        files = [
            File("mmc-meta.conf", text_of(meta)),
            File("mmc-local.conf", self._local_conf(where, engine, largest)),
            File("run_meta_service.sh", script("The MetaService: on one host only, before everything else.", run)),
        ]
        if self.separated:
            owner = ["python", "-m", "kvpool.ops.services.memcache_owner", f"{FOLDER}/mmc-local-standalone.conf"]
            words = f"The owner of this host's memory: on every host ({self.host}), after the MetaService and before engines."
            start = setup + exports(self.series.variables(self.host, self.nic)) + "mkdir -p /run/kvpool\nexec "
            start += command_lines([*owner, "/run/kvpool/local-service.ready"])
            files.append(File("mmc-local-standalone.conf", self._local_conf(where, self.dram, largest)))
            files.append(File("run_local_service.sh", script(words, start)))
        return files

    def _local_conf(self, where: Addresses, dram: int, largest: int) -> str:
        values = local_values(where, self.series.memcache_protocol, dram, largest)
        return text_of({**values, f"{LOCAL}.world_size": "256"})  # the most processes there will ever be

    def _yuanrong(self) -> list[File]:
        metastore = f"{self.service_host}:{METASTORE}"
        flags = {
            "worker_address": '"$HOST_IP:' + f'{WORKER}"',
            "metastore_address": metastore,
            "shared_memory_size_mb": str(self.dram >> 20),
            "shared_memory_populate": "true",
            "arena_per_tenant": "1",
            "enable_fallocate": "false",
            "rpc_thread_num": "64",
            "oc_thread_num": "64",
            "enable_worker_worker_batch_get": "true",
            "sc_regular_socket_num": "0",
            "sc_stream_socket_num": "0",
            "log_dir": "/var/log/yuanrong/worker",
        }
        body = ': "${HOST_IP:?set HOST_IP to the address of this host that the other hosts reach}"\n'
        body += "mkdir -p /var/log/yuanrong/worker\nmetastore=()\n"
        body += f'[ "$HOST_IP" != {self.service_host} ] || metastore=(--start_metastore_service true)\n'
        lines = ["dscli start -w", *(f"--{name} {value}" for name, value in flags.items()), '"${metastore[@]}"']
        body += " \\\n    ".join(lines) + "\n"
        body += f'sed "s/HOST_IP/$HOST_IP/" {FOLDER}/yuanrong.json.in > {FOLDER}/yuanrong.json\n'
        client = {"worker_addr": f"HOST_IP:{WORKER}", "connect_timeout_ms": 9000, "request_timeout_ms": 1000}
        first = f"first on {self.service_host}, which has the metastore"
        words = f"A worker: on every host, {first}. Writes yuanrong.json of this host."
        return [File("yuanrong.json.in", _json(client)), File("run_worker.sh", script(words, body))]


def script(words: str, body: str) -> str:
    return f"#!/usr/bin/env bash\n# {words}\nset -eo pipefail\n\n{body}"


def _json(values: dict[str, object]) -> str:
    return json.dumps(values, indent=4) + "\n"
