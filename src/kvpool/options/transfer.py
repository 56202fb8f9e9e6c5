"""The whole kv-transfer-config: one connector, or several under MultiConnector."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvpool.options import connectors as names
from kvpool.options.ascend_rules import check_policy, check_role
from kvpool.options.availability import refuse_unavailable
from kvpool.options.deployment import UNKNOWN, Deployment
from kvpool.options.errors import UNSET, OptionError
from kvpool.options.fields import DEFAULT, JSON, OptionModel, unknown_key
from kvpool.options.load import Loaded, read_ascend_store, refuse_unavailable_parts
from kvpool.options.prefill_decode import check_sparse_role, read_pull, read_remote_d2h
from kvpool.options.scalars import integer
from kvpool.options.sparse import SECTION, SparseOptions, read_sparse

DEFAULT_PORT = 14579
REFUSED = "is refused by vLLM"
TOP_KEYS = (
    "kv_connector",
    "kv_role",
    "kv_port",
    "kv_load_failure_policy",
    "kv_connector_extra_config",
    "kv_connector_module_path",
    "engine_id",
    "kv_buffer_device",
    "enable_permute_local_kv",
)


@dataclass(frozen=True, slots=True)
class ParsedConnector:
    """One connector. ``path`` is where it stands: "" at the top, else "connectors[i]".

    ``options`` is None for connectors that are not ours; ``loaded`` is there for AscendStoreConnector.
    """

    name: str
    path: str
    kv_role: str
    kv_port: int
    options: OptionModel | None = None
    sources: dict[str, str] = field(default_factory=dict)
    loaded: Loaded | None = None

    @property
    def where(self) -> str:
        """How messages name it: not at all at the top, where there is only one."""
        return _label(self.path, self.name)


@dataclass(frozen=True, slots=True)
class ParsedTransfer:
    """A valid kv-transfer-config. ``multi`` tells whether MultiConnector holds the connectors."""

    connectors: list[ParsedConnector]
    kv_load_failure_policy: str
    multi: bool
    sparse: SparseOptions | None
    warnings: list[str]
    policy_source: str = DEFAULT
    sparse_sources: dict[str, str] = field(default_factory=dict)


def parse_transfer_config(
    raw: Mapping[str, object],
    *,
    env: Mapping[str, str],
    additional_config: Mapping[str, object] | None = None,
    deployment: Deployment = UNKNOWN,
) -> ParsedTransfer:
    """OptionError, in one line, for everything that must not start; what is only not available yet comes last."""
    parsed = read_transfer_config(raw, env=env, additional_config=additional_config, deployment=deployment)
    for connector in parsed.connectors:
        where = connector.where
        if connector.name in (names.PULL, names.REMOTE_D2H):
            refuse_unavailable(connector.name, "kv_connector", connector.name, connector.path)
        if connector.loaded is not None:
            refuse_unavailable_parts(connector.loaded, deployment, where)
    if parsed.sparse is not None and parsed.sparse.enabled:
        refuse_unavailable(SECTION, "enabled", True, SECTION)
    return parsed


def read_transfer_config(
    raw: Mapping[str, object],
    *,
    env: Mapping[str, str],
    additional_config: Mapping[str, object] | None = None,
    deployment: Deployment = UNKNOWN,
) -> ParsedTransfer:
    """Like ``parse_transfer_config``, but accepts valid options that are not available yet."""
    name, warnings = names.check_connector(raw.get("kv_connector"), raw.get("kv_connector_module_path"), "")
    kv_role = check_role(raw.get("kv_role"))
    policy = check_policy(raw.get("kv_load_failure_policy"))
    warnings += [unknown_key(key, TOP_KEYS, fate=REFUSED) for key in raw if key not in TOP_KEYS]
    multi = name == names.MULTI
    connectors: list[ParsedConnector] = []
    for path, entry in _children(raw, warnings) if multi else [("", raw)]:
        connectors.append(_read_connector(entry, path, env, deployment, warnings))
    sparse, sparse_sources = None, {}
    if additional_config is not None:
        reading = read_sparse(additional_config, kv_role, deployment)
        sparse, sparse_sources = reading.options, reading.sources
        warnings += reading.warnings
    _check_together(connectors, sparse)
    given = raw.get("kv_load_failure_policy") is not None
    if not given and any(connector.name == names.POOL for connector in connectors):
        warnings.append(
            'kv_load_failure_policy is not set: a failed load ends its request with an error; "recompute" recomputes it'
        )
    lines = list(dict.fromkeys(warnings))
    return ParsedTransfer(connectors, policy, multi, sparse, lines, JSON if given else DEFAULT, sparse_sources)


def check_children(raw: Mapping[str, object]) -> list[str]:
    """For one child of a MultiConnector that is starting: warnings about the entries; OptionError where its kind is there twice."""
    warnings: list[str] = []
    _refuse_twins([child.get("kv_connector") for _, child in _children(raw, warnings)])
    return warnings


def _children(raw: Mapping[str, object], warnings: list[str]) -> list[tuple[str, Mapping[str, object]]]:
    """The connectors of a MultiConnector with their paths."""
    extra = _extra_config(raw, names.MULTI)
    warnings += [unknown_key(key, ("connectors",), names.MULTI) for key in extra if key != "connectors"]
    children = extra.get("connectors")
    if not isinstance(children, list) or not children:
        raise OptionError("connectors", children, "expected a list of at least one connector", where=names.MULTI)
    pairs: list[tuple[str, Mapping[str, object]]] = []
    for index, child in enumerate(children):
        path = f"connectors[{index}]"
        if not isinstance(child, Mapping):
            raise OptionError(path, child, "expected an object", where=names.MULTI)
        if child.get("engine_id") is not None:
            raise OptionError(
                "engine_id", child["engine_id"], "belongs to the top level: a child has that of MultiConnector", where=path
            )
        if child.get("kv_load_failure_policy") is not None:
            check_policy(child["kv_load_failure_policy"], path)
            warnings.append(f"{path}: kv_load_failure_policy has no effect there: move it to the top level")
        if child.get("kv_connector") == names.MULTI:
            raise OptionError("kv_connector", names.MULTI, "cannot be nested", where=path)
        warnings += [unknown_key(key, TOP_KEYS, path, fate=REFUSED) for key in child if key not in TOP_KEYS]
        pairs.append((path, child))
    return pairs


def _extra_config(entry: Mapping[str, object], where: str) -> Mapping[str, object]:
    extra = entry.get("kv_connector_extra_config")
    if extra is None:
        return {}
    if not isinstance(extra, Mapping):
        raise OptionError("kv_connector_extra_config", extra, "expected an object", where=where)
    return extra


def _label(path: str, name: str) -> str:
    return f"{path} {name}" if path else ""


def _read_port(entry: Mapping[str, object], where: str) -> int:
    value = entry.get("kv_port")
    form = integer(1, 65535)
    try:
        return DEFAULT_PORT if value is None else form.read(value)
    except ValueError:
        raise OptionError("kv_port", value, f"expected {form.accepted}", where=where) from None


def _read_connector(
    entry: Mapping[str, object], path: str, env: Mapping[str, str], deployment: Deployment, warnings: list[str]
) -> ParsedConnector:
    """Parse one connector by its own rules; appends to ``warnings``."""
    name, renamed = names.check_connector(entry.get("kv_connector"), entry.get("kv_connector_module_path"), path)
    warnings += renamed if path else []
    kv_role = check_role(entry.get("kv_role"), path)
    kv_port = _read_port(entry, path)
    where = _label(path, name)
    extra = _extra_config(entry, where)
    if name == names.POOL:
        loaded = read_ascend_store(extra, kv_role=kv_role, env=env, deployment=deployment, where=where)
        warnings += loaded.warnings
        return ParsedConnector(name, path, kv_role, kv_port, loaded.options, loaded.sources, loaded)
    if name == names.PULL:
        pull = read_pull(extra, kv_role, kv_port, deployment, where)
        warnings += pull.warnings
        return ParsedConnector(name, path, kv_role, kv_port, pull.options, pull.sources)
    if name == names.REMOTE_D2H:
        remote = read_remote_d2h(extra, kv_role, kv_port, deployment, where)
        warnings += remote.warnings
        return ParsedConnector(name, path, kv_role, kv_port, remote.options, remote.sources)
    return ParsedConnector(name, path, kv_role, kv_port)


def _check_together(connectors: list[ParsedConnector], sparse: SparseOptions | None) -> None:
    """Combinations of connectors that cannot work."""
    _refuse_twins([connector.name for connector in connectors])
    for connector in connectors:
        if connector.name == names.REMOTE_D2H and sparse is not None:
            check_sparse_role(connector.kv_role, sparse.enabled, connector.where)


def _refuse_twins(kinds: Sequence[object]) -> None:
    if sum(kind in (names.POOL, names.POOL_OLD_NAME) for kind in kinds) > 1:
        raise OptionError("connectors", UNSET, f"{names.POOL} may appear once", where=names.MULTI)
