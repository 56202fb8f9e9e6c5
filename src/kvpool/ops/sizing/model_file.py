"""Finds the config.json of a model: a folder, the file itself, or a repository of the Hugging Face hub."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from kvpool.options import OptionError
from kvpool.options.configfile import read_text
from kvpool.options.errors import UNSET
from kvpool.options.jsonfile import read_json

KEY = "MODEL"
ACCEPTED = "accepted: a folder with config.json, a config.json, or, with huggingface_hub installed, owner/name of a hub repository"
REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+", re.ASCII)


def read_model(model: str, overrides: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The settings in the model's config.json, with ``overrides`` (as vLLM's --hf-overrides) on top.

    OptionError in one line where there is none, or it is no JSON.
    """
    path = os.path.join(model, "config.json") if os.path.isdir(model) else model
    if not os.path.isfile(path):
        if os.path.isdir(model):
            raise OptionError(KEY, model, f"is a folder without config.json; {ACCEPTED}")
        path = _from_hub(model)
    return merged(read_json(read_text(path, KEY), path), overrides or {})


def _from_hub(model: str) -> str:
    """The hub's config.json as a file: from its cache, else downloaded."""
    if not REPOSITORY.fullmatch(model):
        raise OptionError(KEY, model, f"does not exist; {ACCEPTED}")
    try:
        from huggingface_hub import hf_hub_download
    except ImportError:
        reason = f"is no file here, and huggingface_hub, which could fetch it as a hub repository, is not installed; {ACCEPTED}"
        raise OptionError(KEY, model, reason) from None
    try:
        return str(hf_hub_download(model, "config.json", etag_timeout=10.0))
    except Exception as error:  # noqa: BLE001 - of whatever kind: the hub's client has dozens
        line = str(error).strip().splitlines()
        reason = f"is no file here, and the hub gave none ({type(error).__name__}{': ' + line[0] if line else ''}); {ACCEPTED}"
        raise OptionError(KEY, model, reason) from None


def merged(settings: dict[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """``overrides`` win; objects are merged key by key."""
    result = dict(settings)
    for key, value in overrides.items():
        old = result.get(key)
        result[key] = merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return result


def text_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """The part that describes the language model, for models with more than one."""
    for name in ("thinker_config", "text_config", "llm_config", "language_config"):
        inner = settings.get(name)
        if isinstance(inner, dict):
            kept = {key: settings[key] for key in ("quantization_config",) if key in settings}
            return text_settings({**kept, **inner})
    return settings


def whole(settings: Mapping[str, Any], *names: str, default: int | None = None) -> int:
    """The first of ``names`` that is set, a positive integer. OptionError where it is another thing, or is not there at all."""
    for name in names:
        value = settings.get(name)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise OptionError(name, value, "expected an integer of at least 1", where="config.json")
        return value
    if default is not None:
        return default
    raise OptionError(
        names[0], UNSET, f"is not in config.json: give it with --hf-overrides '{{\"{names[0]}\": …}}'", where="config.json"
    )
