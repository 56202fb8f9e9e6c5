"""From what the operator gives (flags, a kv-transfer-config, files and commands of services, the environment) to a Need."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from kvpool.ops.doctor.endpoints import listens, services
from kvpool.ops.doctor.finding import Finding
from kvpool.ops.doctor.need import HARDWARE, Link, Need, Role, Series
from kvpool.ops.doctor.raw import disks, layerwise, pool_options, remote_d2h, top_level
from kvpool.ops.doctor.rules.configuration import judge_configuration, judge_role
from kvpool.ops.launch.series import Series as SeriesHardware
from kvpool.ops.launch.series import series_backend, series_of
from kvpool.options.ascend_store import BACKENDS, AscendStoreOptions, BackendName
from kvpool.options.backend import CONFIG_VARIABLE
from kvpool.options.backend_file import BackendFile, read_backend_file
from kvpool.options.check import TRANSFER, FileKind, check, file_kind
from kvpool.options.commands import parse_command
from kvpool.options.configfile import read_text
from kvpool.options.cross_check import SWITCHES, Parts, read_commands, read_meta
from kvpool.options.deployment import Deployment
from kvpool.options.environment import check_hash_algo
from kvpool.options.errors import OptionError
from kvpool.options.jsonfile import read_json
from kvpool.options.load import read_ascend_store
from kvpool.options.memcache_conf import LocalConf, read_meta_conf
from kvpool.options.memcache_rules import SERIES
from kvpool.options.mooncake_rules import FABRIC_MEMORY
from kvpool.options.prefill_decode import PullOptions
from kvpool.options.probe import Probe
from kvpool.options.transfer import ParsedConnector, ParsedTransfer, read_transfer_config

KV_ROLES: dict[Role, str] = {"prefill": "kv_producer", "decode": "kv_consumer", "mixed": "kv_both"}
_KINDS: dict[str, BackendName] = {"mooncake": "mooncake", "memcache local": "memcache", "yuanrong": "yuanrong"}
_LINKS: dict[str, Link] = {"device_rdma": "roce", "device_sdma": "hccs", "device_urma": "ub", "device_uboe": "uboe"}


@dataclass(frozen=True, slots=True)
class Asked:
    """The flags of the command. ``configs`` are paths, or one kv-transfer-config as JSON text."""

    role: Role | None = None
    series: Series | None = None
    backend: BackendName | None = None
    link: Link | None = None
    configs: tuple[str, ...] = ()
    commands: tuple[str, ...] = ()
    ranks: int | None = None
    hosts: int | None = None
    hash_algo: str | None = None
    lingqu: str | None = None
    ports: tuple[int, ...] = ()
    peers: tuple[str, ...] = ()
    npu_peers: tuple[str, ...] = ()
    measure: bool | None = None


@dataclass(slots=True)
class Given:
    """The texts of ``configs``: the kv-transfer-config, the store's own file by path, other files of services."""

    transfer: tuple[str, str] | None = None
    store: tuple[BackendName, str] | None = None
    files: list[str] = field(default_factory=list)


def choose(asked: Asked, env: Mapping[str, str], probe: Probe) -> tuple[Need, list[Finding]]:
    """What is needed, and what there is to say of the configuration. OptionError only for flags that cannot be understood, and
    for a link that the series does not have."""
    check_hash_algo(asked.hash_algo)
    series = asked.series or _series(probe)
    hardware = series_of(series, asked.link)
    given = _read_configs(asked.configs)
    deployment = Deployment(
        device="npu" if series in HARDWARE else "cuda" if series == "cuda" else "cpu",
        hardware=HARDWARE.get(series),
        local_ranks=asked.ranks or 1,
        hosts=asked.hosts,
        hash_algo=asked.hash_algo,
        host=probe,
    )
    seen = dict(env)
    if given.store is not None:
        seen[CONFIG_VARIABLE[given.store[0]]] = given.store[1]
    raw = top_level(given.transfer[1], given.transfer[0]) if given.transfer is not None else {}
    parsed = _parse(raw, seen, deployment)
    role = asked.role or _role(raw)
    pool = next((connector.loaded for connector in parsed.connectors if connector.loaded), None) if parsed else None
    backend = asked.backend or (pool.options.backend if pool else None) or _written(raw) or _hinted(given, env, hardware)
    options = pool.options if pool is not None and pool.options.backend == backend else None
    if given.transfer is None:
        options = _options(backend, role, seen, deployment)
    file = _file(backend, seen, deployment)
    variable = CONFIG_VARIABLE.get(backend, "")
    path = seen.get(variable, "")
    parts = _parts(asked, given, seen, deployment)
    pull = _pull(parsed)
    need = Need(
        role=role,
        series=series,
        backend=backend,
        link=asked.link or _link(series, file, seen),
        ranks=asked.ranks or 1,
        hosts=asked.hosts,
        env=dict(env),
        options=options,
        pull=pull.options if pull is not None and isinstance(pull.options, PullOptions) else None,
        conf=file.options if file is not None else None,
        conf_path=path,
        conf_variable=variable,
        layerwise=layerwise(raw),
        remote_d2h=remote_d2h(raw),
        disks=disks(backend, pool_options(raw), path),
        leases=_leases(parts),
        masters=tuple(parts.masters.values()),
        workers=tuple(parts.workers.values()),
        hash_algo=asked.hash_algo,
        lingqu=asked.lingqu,
        services=services(file.options if file is not None else None, parts),
        ports=listens(pull, role, seen, asked.ports),
        peers=asked.peers,
        npu_peers=asked.npu_peers,
        measure=asked.measure if asked.measure is not None else backend == "local",
    )
    error, warnings = _checked(given, backend, need, seen, deployment, asked.commands)
    return need, judge_configuration(error, warnings) + judge_role(asked.role, raw.get("kv_role"), KV_ROLES[role])


def _series(probe: Probe) -> Series:
    """What this host shows; OptionError where it is an NPU, whose series does not show."""
    accelerator = probe.accelerator()
    if accelerator == "npu":
        raise OptionError("--series", None, "is required where there are NPUs: a2, a3 or a5")
    return "cuda" if accelerator == "cuda" else "cpu"


def _read_configs(configs: Sequence[str]) -> Given:
    given = Given()
    for config in configs:
        text = config if config.lstrip().startswith("{") else read_text(config, "--config")
        kind = _kind(config, text)
        if kind == TRANSFER:
            if given.transfer is not None:
                raise OptionError("--config", config, "is a second kv-transfer-config: look at one engine at a time")
            given.transfer = (TRANSFER if text is config else config, text)
        elif text is config:
            raise OptionError("--config", config, "expected a kv-transfer-config, or the path of a file")
        elif kind in _KINDS and given.store is None:
            given.store = (_KINDS[kind], config)
        else:
            given.files.append(config)
    return given


def _kind(config: str, text: str) -> FileKind:
    """What ``--config`` gave; JSON that cannot be read is refused where it is wrong."""
    if text is config:
        read_json(text, "--config")
    try:
        return file_kind(TRANSFER if text is config else config, text)
    except OptionError as error:
        raise error if error.key != "--file" else OptionError("--config", config, error.reason) from None


def _parse(raw: Mapping[str, object], env: Mapping[str, str], deployment: Deployment) -> ParsedTransfer | None:
    """The kv-transfer-config; None where there is none, or it is refused (which is said elsewhere)."""
    if raw:
        with suppress(OptionError):
            return read_transfer_config(raw, env=env, deployment=deployment)
    return None


def _role(raw: Mapping[str, object]) -> Role:
    return next((role for role, name in KV_ROLES.items() if name == raw.get("kv_role")), "mixed")


def _written(raw: Mapping[str, object]) -> BackendName | None:
    """The store that a kv-transfer-config names, also one that is refused."""
    return next((name for name in BACKENDS if name == pool_options(raw).get("backend")), None)


def _hinted(given: Given, env: Mapping[str, str], series: SeriesHardware) -> BackendName:
    """The store whose file is given, or named by the environment; where there is none, the usual one of the series."""
    if given.store is not None:
        return given.store[0]
    named = [backend for backend, variable in CONFIG_VARIABLE.items() if env.get(variable)]
    if not named and env.get("DS_WORKER_ADDR"):
        return "yuanrong"
    return named[0] if named else series_backend(None, series, separated=False)


def _options(backend: BackendName, role: Role, env: Mapping[str, str], deployment: Deployment) -> AscendStoreOptions:
    """Defaults, where no kv-transfer-config was given or it could not be read."""
    with suppress(OptionError):
        return read_ascend_store({"backend": backend}, kv_role=KV_ROLES[role], env=env, deployment=deployment).options
    return AscendStoreOptions.model_validate({"backend": backend})


def _file(backend: BackendName, env: Mapping[str, str], deployment: Deployment) -> BackendFile | None:
    with suppress(OptionError):
        return read_backend_file(backend, env, deployment)
    return None


def _parts(asked: Asked, given: Given, env: Mapping[str, str], deployment: Deployment) -> Parts:
    """Services' commands and files that can be read; what is wrong with the others is said by ``_checked``."""
    parts = Parts()
    for command in asked.commands:
        parse_command(command, "--service", SWITCHES)
        with suppress(OptionError):
            read_commands([command], parts, deployment)
    for path in given.files:
        with suppress(OptionError):
            if file_kind(path, text := read_text(path, "--config")) == "memcache meta":
                parts.add(path, read_meta_conf(text, path).options)
    with suppress(OptionError):
        read_meta(None, env, parts)
    return parts


def _leases(parts: Parts) -> tuple[tuple[str, int], ...]:
    found = [("default_kv_lease_ttl", master.default_kv_lease_ttl) for master in parts.masters.values()]
    found += [("ock.mmc.meta.lease_ttl_ms", meta.lease_ttl_ms) for meta in parts.meta.values() if meta.lease_ttl_ms is not None]
    return tuple(found)


def _pull(parsed: ParsedTransfer | None) -> ParsedConnector | None:
    pulls = [connector for connector in parsed.connectors if isinstance(connector.options, PullOptions)] if parsed else []
    return pulls[0] if pulls else None


def _link(series: Series, file: BackendFile | None, env: Mapping[str, str]) -> Link | None:
    """What the store's protocol or the environment shows of the links; None where neither does."""
    if file is not None and isinstance(file.options, LocalConf):
        protocol = file.options.protocol
        if HARDWARE.get(series) in SERIES.get(protocol, ()):
            return _LINKS[protocol]
    if series == "a2":
        return "roce"
    if series == "a3" and env.get(FABRIC_MEMORY) != "1" and env.get("HCCL_INTRA_ROCE_ENABLE") == "1":
        return "roce"
    return None


def _checked(
    given: Given, backend: BackendName, need: Need, env: Mapping[str, str], deployment: Deployment, commands: Sequence[str]
) -> tuple[str, list[str]]:
    """Why the configuration would be refused, or its warnings, as `kvpool config check` has them."""
    files = [*given.files] + ([given.store[1]] if given.store is not None else [])
    arguments: dict[str, Any] = {"deployment": deployment, "services": list(commands)}
    transfer = None
    if given.transfer is not None:
        source, text = given.transfer
        transfer = text if source == TRANSFER else None
        files += [] if source == TRANSFER else [source]
    elif need.conf_variable and env.get(need.conf_variable) and env[need.conf_variable] not in files:
        files.append(env[need.conf_variable])
    try:
        checked = check(transfer, files, env, **arguments)
        if given.transfer is None and backend != "local":
            read_backend_file(backend, env, deployment)
        return "", checked.warnings
    except OptionError as error:
        return str(error), []
