"""What `kvpool config check` does, without a terminal: parse everything that was handed in and report it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, cast

from kvpool.options.ascend_store import BackendName
from kvpool.options.availability import ENGINE_DEVICES
from kvpool.options.backend_file import BackendFile, parse_backend_file
from kvpool.options.configfile import read_text
from kvpool.options.cross_check import Parts, cross_check, read_commands, read_meta
from kvpool.options.deployment import UNKNOWN, Deployment
from kvpool.options.errors import UNSET, OptionError
from kvpool.options.fields import Reading
from kvpool.options.jsonfile import clean, read_json
from kvpool.options.memcache_conf import MetaConf, clean_conf, conf_kind, parse_conf, read_meta_conf
from kvpool.options.prefill_decode import PullOptions
from kvpool.options.pull_rules import judge_pull
from kvpool.options.reach import check_reach
from kvpool.options.report import Section, options_section, resources_section, transfer_sections
from kvpool.options.store_rules import check_conf
from kvpool.options.transfer import ParsedTransfer, parse_transfer_config

FileKind = Literal["mooncake", "yuanrong", "memcache local", "memcache meta", "kv-transfer-config"]
TRANSFER = "kv-transfer-config"
ADDITIONAL = "additional-config"
DEVICE_UNKNOWN = "the device is not known, so protocols were not compared with it: give --device"


@dataclass(slots=True)
class Checked:
    """The report. ``cleaned`` holds, by source, the texts that had slips and were cleaned; ``removed`` says what was removed;
    ``notes`` are facts to know."""

    sections: list[Section] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    cleaned: dict[str, str] = field(default_factory=dict)
    removed: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def file_kind(path: str, text: str) -> FileKind:
    """What a file is: by its keys where they tell, else by its name. OptionError where neither does."""
    name = path.rsplit("/", 1)[-1].lower()
    if not text.lstrip().startswith("{"):
        if "ock.mmc." in text or name.startswith("mmc-"):
            return "memcache local" if conf_kind(parse_conf(text, path, fix=True)) == "local" else "memcache meta"
    elif '"kv_connector"' in text:
        return "kv-transfer-config"
    elif '"worker_addr"' in text or "yuanrong" in name:
        return "yuanrong"
    elif '"master_server_address"' in text or '"metadata_server"' in text or "mooncake" in name:
        return "mooncake"
    raise OptionError(
        "--file", path, "is neither mooncake.json, mmc-local.conf, mmc-meta.conf, yuanrong.json nor a kv-transfer-config"
    )


def check(
    transfer: str | None,
    files: Sequence[str],
    env: Mapping[str, str],
    *,
    additional: str | None = None,
    fix: bool = False,
    deployment: Deployment = UNKNOWN,
    meta: str | None = None,
    services: Sequence[str] = (),
    proxy_port: int | None = None,
) -> Checked:
    """Parse a kv-transfer-config, files and commands of services, and compare them; OptionError for what must not start.

    With ``fix``, slips are cleaned first. ``meta`` is the path of an mmc-meta.conf; ``proxy_port`` is where the proxy listens."""
    checked, parts = Checked(), Parts()
    texts = {path: read_text(path, "--file") for path in files}
    kinds = {path: file_kind(path, text) for path, text in texts.items()}
    if fix:
        texts = {path: _cleaned(path, text, checked, conf=kinds[path].startswith("memcache")) for path, text in texts.items()}
        transfer = None if transfer is None else _cleaned(TRANSFER, transfer, checked)
        additional = None if additional is None else _cleaned(ADDITIONAL, additional, checked)
    transfers = [] if transfer is None else [(TRANSFER, transfer)]
    transfers += [(path, text) for path, text in texts.items() if kinds[path] == TRANSFER]
    additional_config = None if additional is None else read_json(additional, ADDITIONAL)
    _check_files(
        [(path, kinds[path], text) for path, text in texts.items() if kinds[path] != TRANSFER], env, deployment, checked, parts
    )
    for source, text in transfers:
        parsed = parse_transfer_config(read_json(text, source), env=env, additional_config=additional_config, deployment=deployment)
        checked.sections += transfer_sections(parsed, env, deployment)
        checked.warnings += parsed.warnings
        _add_connectors(parsed, checked, parts)
        _check_pulls(parsed, env, deployment, checked)
    _compare(parts, env, deployment, checked, meta, services, proxy_port)
    return checked


def _cleaned(source: str, text: str, checked: Checked, *, conf: bool = False) -> str:
    """``text`` without slips; what was removed goes into ``checked``."""
    fixed, removed = clean_conf(text, source) if conf else clean(text, source)
    if removed:
        checked.cleaned[source] = fixed
        checked.removed += removed
    return fixed


def _check_files(
    files: Sequence[tuple[str, FileKind, str]], env: Mapping[str, str], deployment: Deployment, checked: Checked, parts: Parts
) -> None:
    """Parse files of stores into ``checked`` and ``parts``."""
    for path, kind, text in files:
        parsed: Reading[MetaConf] | BackendFile
        if kind == "memcache meta":
            parsed = read_meta_conf(text, path)
        else:
            backend = cast(BackendName, kind.split()[0])
            check_reach(backend, deployment.device, where=path)
            parsed = parse_backend_file(backend, path, text, env, deployment)
        parts.add(path, parsed.options)
        checked.sections.append(options_section(f"{kind}: {path}", parsed.options, parsed.sources))
        found = check_conf(parsed.options, env)
        checked.warnings += parsed.warnings + found.warnings
        checked.notes += found.notes


def _add_connectors(parsed: ParsedTransfer, checked: Checked, parts: Parts) -> None:
    """The stores that connectors use take part in the comparison."""
    for loaded in [connector.loaded for connector in parsed.connectors if connector.loaded is not None]:
        checked.notes += loaded.notes
        if loaded.backend_file is not None:
            parts.add(loaded.backend_file.path or "environment", loaded.backend_file.options)
            parts.deadline(loaded.options.load_timeout_ms)


def _check_pulls(parsed: ParsedTransfer, env: Mapping[str, str], deployment: Deployment, checked: Checked) -> None:
    """What connectors from prefill to decode find around them."""
    for connector in parsed.connectors:
        if isinstance(connector.options, PullOptions):
            facts = judge_pull(connector.options, connector.sources, env, deployment, connector.where)
            checked.warnings += facts.warnings
            checked.notes += facts.notes
            if facts.chosen.engine == "mooncake" and deployment.device is None:
                checked.notes.append(DEVICE_UNKNOWN)


def _compare(
    parts: Parts,
    env: Mapping[str, str],
    deployment: Deployment,
    checked: Checked,
    meta: str | None,
    services: Sequence[str],
    proxy_port: int | None,
) -> None:
    sections, warnings = read_commands(list(services), parts, deployment)
    checked.sections += sections + read_meta(meta, env, parts)
    if parts.mooncake:
        checked.sections += resources_section(env)
    checked.warnings += warnings + cross_check(parts, env, proxy_port)
    checked.warnings = list(dict.fromkeys(checked.warnings))
    if deployment.device is None and (parts.mooncake or parts.local):
        checked.notes.append(DEVICE_UNKNOWN)
    if deployment.device is not None and deployment.device not in ENGINE_DEVICES:
        checked.notes.append(f"engines refuse to start on {deployment.device} yet: this version of kvpool runs them on CPUs only")
    checked.notes = list(dict.fromkeys(checked.notes))


def the_cleaned(checked: Checked) -> str:
    """The one text that was cleaned; OptionError where there is none or several."""
    if len(checked.cleaned) != 1:
        found = ", ".join(checked.cleaned) or "nothing"
        raise OptionError("--fix", UNSET, f"writes one file, but {found} needed cleaning")
    return next(iter(checked.cleaned.values()))
