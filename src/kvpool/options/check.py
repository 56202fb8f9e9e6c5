"""What `kvpool config check` does, without a terminal: parse everything that was handed in and report it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from kvpool.options.backend_file import parse_backend_file
from kvpool.options.configfile import read_text
from kvpool.options.deployment import UNKNOWN, Deployment
from kvpool.options.errors import UNSET, OptionError
from kvpool.options.jsonfile import clean, read_json
from kvpool.options.memcache_conf import LocalConf, MetaConf, check_pair, clean_conf, conf_kind, parse_conf, read_meta_conf
from kvpool.options.report import Section, options_section, transfer_sections
from kvpool.options.transfer import parse_transfer_config

FileKind = Literal["mooncake", "yuanrong", "memcache local", "memcache meta", "kv-transfer-config"]
TRANSFER = "kv-transfer-config"
ADDITIONAL = "additional-config"


@dataclass(slots=True)
class Checked:
    """The report. ``cleaned`` holds, by source, the texts that had slips and were cleaned; ``removed`` says what was removed."""

    sections: list[Section] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    cleaned: dict[str, str] = field(default_factory=dict)
    removed: list[str] = field(default_factory=list)


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
) -> Checked:
    """Parse a kv-transfer-config and files; OptionError for what must not start. With ``fix``, slips are cleaned first."""
    checked = Checked()
    texts = {path: read_text(path, "--file") for path in files}
    kinds = {path: file_kind(path, text) for path, text in texts.items()}
    if fix:
        texts = {path: _cleaned(path, text, checked, conf=kinds[path].startswith("memcache")) for path, text in texts.items()}
        transfer = None if transfer is None else _cleaned(TRANSFER, transfer, checked)
        additional = None if additional is None else _cleaned(ADDITIONAL, additional, checked)
    transfers = [] if transfer is None else [(TRANSFER, transfer)]
    transfers += [(path, text) for path, text in texts.items() if kinds[path] == TRANSFER]
    additional_config = None if additional is None else read_json(additional, ADDITIONAL)
    _check_files([(path, kinds[path], text) for path, text in texts.items() if kinds[path] != TRANSFER], env, deployment, checked)
    for source, text in transfers:
        parsed = parse_transfer_config(read_json(text, source), env=env, additional_config=additional_config, deployment=deployment)
        checked.sections += transfer_sections(parsed, env, deployment)
        checked.warnings += parsed.warnings
    return checked


def _cleaned(source: str, text: str, checked: Checked, *, conf: bool = False) -> str:
    """``text`` without slips; what was removed goes into ``checked``."""
    fixed, removed = clean_conf(text, source) if conf else clean(text, source)
    if removed:
        checked.cleaned[source] = fixed
        checked.removed += removed
    return fixed


def _check_files(
    files: Sequence[tuple[str, FileKind, str]], env: Mapping[str, str], deployment: Deployment, checked: Checked
) -> None:
    locals_: list[tuple[str, LocalConf]] = []
    metas: list[MetaConf] = []
    for path, kind, text in files:
        title = f"{kind}: {path}"
        if kind == "memcache meta":
            meta = read_meta_conf(text, path)
            metas.append(meta.options)
            checked.sections.append(options_section(title, meta.options, meta.sources))
            checked.warnings += meta.warnings
            continue
        parsed = parse_backend_file(kind.split()[0], path, text, env, deployment)
        parsed.refuse_unavailable_parts()
        if isinstance(parsed.options, LocalConf):
            locals_.append((path, parsed.options))
        checked.sections.append(options_section(title, parsed.options, parsed.sources))
        checked.warnings += parsed.warnings
    for path, local in locals_:
        for meta_options in metas:
            check_pair(local, meta_options, path)


def the_cleaned(checked: Checked) -> str:
    """The one text that was cleaned; OptionError where there is none or several."""
    if len(checked.cleaned) != 1:
        found = ", ".join(checked.cleaned) or "nothing"
        raise OptionError("--fix", UNSET, f"writes one file, but {found} needed cleaning")
    return next(iter(checked.cleaned.values()))
