"""From `kv_connector_extra_config` and environment to valid options of AscendStoreConnector, before anything starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvpool.options import ascend_rules
from kvpool.options.ascend_store import INTERNAL, AscendStoreOptions
from kvpool.options.backend import Choice, choose_backend
from kvpool.options.backend_file import BackendFile, read_backend_file
from kvpool.options.deployment import UNKNOWN, Deployment
from kvpool.options.environment import hash_warning, merge_qos
from kvpool.options.fields import JSON, Reading, located, read_fields
from kvpool.options.local_ssd import check_local_ssd, without_unused_path
from kvpool.options.store_rules import check_store


@dataclass(frozen=True, slots=True)
class Loaded:
    """Valid options. ``sources`` says for each field where its value came from.

    ``env_updates`` are to be set before the store opens; ``backend_file`` is what the chosen backend's file says, if it has one.
    ``notes`` are facts to log once at start.
    """

    options: AscendStoreOptions
    warnings: list[str] = field(default_factory=list)
    sources: dict[str, str] = field(default_factory=dict)
    env_updates: dict[str, str] = field(default_factory=dict)
    backend_file: BackendFile | None = None
    notes: list[str] = field(default_factory=list)


def load_ascend_store(
    extra: Mapping[str, object],
    *,
    kv_role: str,
    env: Mapping[str, str],
    deployment: Deployment = UNKNOWN,
    kv_load_failure_policy: str | None = None,
    where: str = "",
) -> Loaded:
    """The effective options. OptionError, naming key, value and accepted form, for everything that must not start."""
    loaded = read_ascend_store(extra, kv_role=kv_role, env=env, deployment=deployment, where=where)
    ascend_rules.check_policy(kv_load_failure_policy, where)
    refuse_unavailable_parts(loaded, deployment, where)
    return loaded


def refuse_unavailable_parts(loaded: Loaded, deployment: Deployment, where: str = "") -> None:
    """NotAvailableError where valid options need a later version."""
    ascend_rules.refuse_later_work(loaded.options, deployment, where)


def read_ascend_store(
    extra: Mapping[str, object], *, kv_role: str, env: Mapping[str, str], deployment: Deployment = UNKNOWN, where: str = ""
) -> Loaded:
    """Like ``load_ascend_store``, but accepts valid options that are not available yet."""
    ascend_rules.check_role(kv_role, where)
    renamed, lines = _rename_deprecated(without_unused_path(extra))
    reading = read_fields(AscendStoreOptions, renamed, where=where, internal=INTERNAL)
    given = {name for name, source in reading.sources.items() if source != "default"}
    choice = choose_backend(reading.options.backend if "backend" in given else None, kv_role, env, where)
    options = _complete(reading.options, choice, given)
    lines += [choice.warning] if choice.warning else []
    lines += ascend_rules.check_dependencies(options, given, kv_role, deployment, where)
    lines += check_local_ssd(options, given, where)
    merged = merge_qos(options.backend, options.qos_priority, env)
    backend_file = read_backend_file(options.backend, env, deployment, use_layerwise=options.use_layerwise)
    found = check_store(options, backend_file, {**env, **merged.updates})
    lines += merged.warnings + (backend_file.warnings if backend_file else []) + found.warnings
    if seed_warning := hash_warning(env, deployment.hash_algo):
        lines.append(seed_warning)
    warnings = reading.warnings + [located(where, line) for line in lines]
    return Loaded(options, warnings, _sources(reading, choice, options), merged.updates, backend_file, found.notes)


def _rename_deprecated(extra: Mapping[str, object]) -> tuple[dict[str, object], list[str]]:
    """``mooncake_rpc_port`` is the old name of ``lookup_rpc_port``."""
    renamed = dict(extra)
    if "mooncake_rpc_port" not in renamed:
        return renamed, []
    old = renamed.pop("mooncake_rpc_port")
    if renamed.setdefault("lookup_rpc_port", old) != old:
        return renamed, ["mooncake_rpc_port is deprecated and ignored: lookup_rpc_port is set too"]
    return renamed, ["mooncake_rpc_port is deprecated: use lookup_rpc_port"]


def _complete(options: AscendStoreOptions, choice: Choice, given: set[str]) -> AscendStoreOptions:
    """Fill in what follows from other values."""
    filled: dict[str, object] = {"backend": choice.backend, "backend_reason": choice.reason}
    if options.prefill_pp_layer_partition is not None and "prefill_pp_size" not in given:
        filled["prefill_pp_size"] = len(options.prefill_pp_layer_partition)
    return options.model_copy(update=filled)


def _sources(reading: Reading[AscendStoreOptions], choice: Choice, options: AscendStoreOptions) -> dict[str, str]:
    sources = reading.sources | {"backend": choice.source, "backend_reason": choice.source}
    if options.prefill_pp_size != reading.options.prefill_pp_size:
        sources["prefill_pp_size"] = f"{JSON} (from prefill_pp_layer_partition)"
    return sources
