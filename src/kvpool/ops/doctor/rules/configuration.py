"""What the option rules say of the given configuration: the same lines as at start, and from `kvpool config check`."""

from __future__ import annotations

from collections.abc import Sequence

from kvpool.devices import copy_engine, device_of
from kvpool.ops.doctor.finding import Check, Finding
from kvpool.ops.doctor.need import Need
from kvpool.options.backend import CONFIG_VARIABLE
from kvpool.options.errors import OptionError
from kvpool.options.reach import check_reach

AREA = "configuration"
SOUND = Check(AREA, "options", "everything that `kvpool config check` looks at")
ROLE = Check(AREA, "role", "--role is the kv_role of the given configuration", "both are given")
DEVICE = Check(AREA, "device", "this version runs engines on such a device, and the store reaches its memory")
CHECKS = (SOUND, ROLE, DEVICE)

FIX = "correct it as the line says; docs/stores/mistakes.md explains every line"


def judge_configuration(error: str, warnings: Sequence[str]) -> list[Finding]:
    """``error`` is why it would be refused, "" where it would not."""
    needed = "a configuration that starts"
    found = [SOUND.failure(error, needed, _fix(error))] if error else []
    found += [SOUND.warning(line, needed, FIX) for line in warnings]
    return found or [SOUND.ok("nothing to say")]


def _fix(error: str) -> str:
    """A store whose file is not named is the first thing that operators meet."""
    for variable in CONFIG_VARIABLE.values():
        if error.startswith(f"{variable}: is not set"):
            return f"export {variable}=<path of the file> for every vLLM process (give it to doctor with --config until then)"
    return FIX


def judge_device(need: Need) -> list[Finding]:
    """As the engine's start does: what is not built yet is refused there."""
    needed = "a device that this version runs on"
    try:
        check_reach(need.backend, need.device)
    except OptionError as error:
        return [DEVICE.failure(str(error), "a store for this device", "name a store that is accepted")]
    try:
        device_of(need.device)
        if need.backend == "local":
            copy_engine(need.device)
    except ValueError as error:
        fix = "run engines on CPUs with this version; the other answers tell what this host will need"
        return [DEVICE.failure(str(error), needed, fix)]
    return [DEVICE.ok(f"{need.device} with {need.backend}")]


def judge_role(asked: str | None, kv_role: object, expected: str) -> list[Finding]:
    """``expected`` is the kv_role of the role that was asked for."""
    if asked is None or kv_role is None:
        return []
    if kv_role != expected:
        fix = f'give the configuration of this role, or "kv_role": "{expected}"'
        return [ROLE.failure(f"kv_role is {kv_role}", f"{expected} (--role {asked})", fix)]
    return [ROLE.ok(f"kv_role is {kv_role}")]
