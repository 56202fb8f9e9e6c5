"""The effective options with the source of each value, as rows for people and as JSON for programs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kvpool.options.ascend_store import AscendStoreOptions
from kvpool.options.deployment import Deployment
from kvpool.options.environment import DEFAULT_HASH, RESOURCE_CONFIG, hash_seed, resource_config
from kvpool.options.errors import OptionError
from kvpool.options.fields import DEFAULT, OptionModel
from kvpool.options.resources import traffic
from kvpool.options.transfer import ParsedConnector, ParsedTransfer


class Row(NamedTuple):
    key: str
    value: Any
    source: str


@dataclass(frozen=True, slots=True)
class Section:
    """The options of one connector or file."""

    title: str
    rows: list[Row] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        return {"title": self.title, "options": {row.key: {"value": row.value, "source": row.source} for row in self.rows}}


def options_section(title: str, options: OptionModel, sources: Mapping[str, str]) -> Section:
    """All fields of ``options`` under the keys that operators write."""
    values = options.model_dump(mode="json", by_alias=True)
    names = type(options).keys()
    return Section(title, [Row(key, value, sources.get(names[key], DEFAULT)) for key, value in values.items()])


def resources_section(env: Mapping[str, str]) -> list[Section]:
    """ASCEND_GLOBAL_RESOURCE_CONFIG, where it is set, with the traffic that each field governs."""
    try:
        raw = resource_config(env)
    except OptionError:
        return []
    rows = [Row(key, value, f"environment; governs {traffic(key) or 'what HIXL takes it for'}") for key, value in raw.items()]
    return [Section(RESOURCE_CONFIG, rows)] if rows else []


def transfer_sections(parsed: ParsedTransfer, env: Mapping[str, str], deployment: Deployment) -> list[Section]:
    """The whole kv-transfer-config: top level, connectors, their files, and the namespace inputs that need no model."""
    policy = Row("kv_load_failure_policy", parsed.kv_load_failure_policy, parsed.policy_source)
    sections = [Section("kv-transfer-config", [policy])]
    for connector in parsed.connectors:
        sections += _connector_sections(connector, env, deployment)
    if parsed.sparse is not None:
        sections.append(options_section("sparse_kv_offload_config", parsed.sparse, parsed.sparse_sources))
    return sections


def _connector_sections(connector: ParsedConnector, env: Mapping[str, str], deployment: Deployment) -> list[Section]:
    title = f"{connector.path} {connector.name}".strip()
    if connector.options is None:
        return [Section(f"{title} (not part of kvpool, not checked)")]
    own = options_section(title, connector.options, connector.sources)
    own.rows.insert(0, Row("kv_role", connector.kv_role, "JSON"))
    sections = [own]
    backend_file = connector.loaded.backend_file if connector.loaded else None
    if backend_file is not None:
        sections.append(options_section(f"{backend_file.backend}: {backend_file.path}", backend_file.options, backend_file.sources))
    if isinstance(connector.options, AscendStoreOptions):
        sections.append(_namespace_section(connector.options, env, deployment))
    return sections


def _namespace_section(options: AscendStoreOptions, env: Mapping[str, str], deployment: Deployment) -> Section:
    """What engines that share a pool must agree on, as far as it is known before a model is."""
    identity = options.cache_namespace or "digest of the model's configuration and weights"
    rows = [
        Row("model identity", identity, "cache_namespace" if options.cache_namespace else DEFAULT),
        Row("block hash", deployment.hash_algo or DEFAULT_HASH, "vLLM" if deployment.hash_algo else "default of vLLM"),
        Row("hash seed", hash_seed(env), "environment"),
    ]
    return Section("namespace inputs (the same on all engines that share)", rows)
