"""What MooncakeConnectorV1 makes of its options, the environment and the host, and what it refuses: at start and in every check."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from kvpool.options.addresses import is_loopback, is_unspecified
from kvpool.options.deployment import Deployment
from kvpool.options.errors import OptionError
from kvpool.options.fields import located
from kvpool.options.mooncake_rules import check_protocol, rdma_warnings
from kvpool.options.prefill_decode import PullOptions, transfer_timeout_ms
from kvpool.options.scalars import integer
from kvpool.options.secret import SECRET_VARIABLE, shared_secret

EngineName = Literal["local_host", "process_vm", "mooncake"]
HOLD = "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT"
HOLD_S = 480
HOLD_MOST_S = 86_400
HOST_VARIABLES = ("VLLM_HOST_IP", "HCCL_IF_IP")
LISTENS = (
    "transfer_engine mooncake listens on all interfaces, on ports of its own choice, without authentication: "
    "keep these hosts in a network of their own"
)
_READ_BY: dict[str, EngineName] = {
    "transfer_protocol": "mooncake",
    "transfer_buffer_size": "local_host",
    "transfer_root": "local_host",
}


class Place(NamedTuple):
    """Where prefill listens and is found. ``key`` is the option or variable that says so, "" where none does."""

    host: str
    key: str

    @property
    def source(self) -> str:
        return self.key or f"neither transfer_host nor {' nor '.join(HOST_VARIABLES)} is set"


class Chosen(NamedTuple):
    """Who moves the bytes, and why."""

    engine: EngineName
    reason: str


@dataclass(frozen=True, slots=True)
class PullFacts:
    """What follows from a configuration that can start. ``hold_s``: how long prefill keeps what nobody has read;
    ``deadline_s``: of one pull or publish. Warnings ask the operator to do something, notes are facts to know."""

    place: Place
    chosen: Chosen
    hold_s: int
    deadline_s: float
    warnings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def judge_pull(
    options: PullOptions, sources: Mapping[str, str], env: Mapping[str, str], deployment: Deployment, where: str = ""
) -> PullFacts:
    """The facts of one side. OptionError, in one line, for what cannot start. ``sources`` are those of the options."""
    place = find_place(options, env)
    if is_unspecified(place.host):
        reason = "is where decode finds prefill: expected an address of this host"
        raise OptionError(place.key, place.host, reason, where=where if place.key == "transfer_host" else "")
    chosen = choose_engine(options, place)
    warnings = _check_secret(options, place, env, where)
    hold_s, deadline_s = hold_seconds(env), transfer_timeout_ms(env) / 1000
    given = {name for name, source in sources.items() if source != "default"}
    warnings += _check_engine(options, chosen, given, deployment, where)
    if (deployment.hosts or 1) > 1 and is_loopback(place.host):
        warnings.append(
            f"prefill listens on {place.host} ({place.source}), but there are {deployment.hosts} hosts: where decode is on another "
            "one, set transfer_host to an address that it reaches"
        )
    notes = [LISTENS] if chosen.engine == "mooncake" else []
    return PullFacts(place, chosen, hold_s, deadline_s, [located(where, line) for line in warnings], notes)


def find_place(options: PullOptions, env: Mapping[str, str]) -> Place:
    """The first that is set, whether one can be found there or not."""
    given = [("transfer_host", options.transfer_host), *((name, env.get(name)) for name in HOST_VARIABLES)]
    return next((Place(host, key) for key, host in given if host), Place("127.0.0.1", ""))


def choose_engine(options: PullOptions, place: Place) -> Chosen:
    """``auto`` looks at the address only, so that both sides come to the same answer."""
    if options.transfer_engine != "auto":
        return Chosen(options.transfer_engine, "transfer_engine")
    if is_loopback(place.host):
        return Chosen("local_host", f"auto: {place.host} is this host")
    return Chosen("mooncake", f"auto: {place.host} can be reached from other hosts")


def hold_seconds(env: Mapping[str, str]) -> int:
    """VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT."""
    form = integer(1, HOLD_MOST_S)
    try:
        return form.read(env.get(HOLD) or HOLD_S)
    except ValueError:
        raise OptionError(HOLD, env[HOLD], f"expected {form.accepted} (seconds)") from None


def _check_secret(options: PullOptions, place: Place, env: Mapping[str, str], where: str) -> list[str]:
    if shared_secret(env) is not None or is_loopback(place.host):
        return []
    if options.transfer_require_auth:
        reason = f"needs {SECRET_VARIABLE}, since {place.host} is not loopback"
        raise OptionError("transfer_require_auth", True, reason, where=where)
    return [
        f"{place.host} is not loopback ({place.source}) and {SECRET_VARIABLE} is not set: whoever reaches this host can read and "
        "release KV on its way, and decode believes any address that a request names; set one secret on prefill, decode and proxy"
    ]


def _check_engine(options: PullOptions, chosen: Chosen, given: Collection[str], deployment: Deployment, where: str) -> list[str]:
    """What the engine cannot do here, and the options that it does not read."""
    engine, device, root = chosen.engine, deployment.device, options.transfer_root
    warnings = []
    if engine == "mooncake":
        if device in ("cpu", "cuda"):  # on an NPU the guides' configuration, which knows no transfer_protocol, must stay valid
            check_protocol("transfer_protocol", options.transfer_protocol, deployment, where)
        warnings += rdma_warnings("transfer_protocol", options.transfer_protocol, deployment)
    if engine == "process_vm" and device not in (None, "cpu"):
        reason = f'reaches host memory only, but the KV lies on {device}: set "mooncake"'
        raise OptionError("transfer_engine", engine, reason, where=where)
    if engine == "local_host" and root is not None and not deployment.host.is_folder(root):
        raise OptionError("transfer_root", root, "is no folder of this host: make it, or leave it out", where=where)
    unused = [name for name, reader in _READ_BY.items() if name in given and reader != engine]
    if unused:
        why = f" ({chosen.reason})" if options.transfer_engine == "auto" else ""
        warnings.append(f"{', '.join(unused)}: no effect with transfer_engine {engine}{why}")
    return warnings
