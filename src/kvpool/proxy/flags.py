"""The command line of the proxies: the flags of the deployment guides, and ours."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from kvpool.options.addresses import is_loopback
from kvpool.options.errors import OptionError
from kvpool.options.secret import SECRET_VARIABLE, shared_secret
from kvpool.proxy.addresses import is_wildcard, pair, read_host
from kvpool.proxy.options import DECODE_FIRST, MODES, PREFILL_FIRST, Deadlines, Limits, ProxyOptions

ADMIN_TOKEN = "KVPOOL_ADMIN_TOKEN"
API_KEY = "OPENAI_API_KEY"
_LIMITS, _DEADLINES = Limits(), Deadlines()
LEVELS = ("debug", "info", "warning", "error")


class _Parser(argparse.ArgumentParser):
    """One line for what is wrong, with the nearest flag for an unknown one; that comes first: it may stand for a required one."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:  # noqa: ANN401 - as argparse's own
        given: list[str] = sys.argv[1:] if args is None else list(args)
        ended = given.index("--") if "--" in given else len(given)
        for word in given[:ended]:
            if word.startswith("--") and word.partition("=")[0] not in self._option_string_actions:
                self.error(f"unrecognized arguments: {word}")
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        name, known = message.rpartition(": ")[2].split(" ")[0], list(self._option_string_actions)
        near = difflib.get_close_matches(name.partition("=")[0], known, 1) if message.startswith("unrecognized") else []
        hint = f" (did you mean {near[0]}?)" if near else ""
        sys.stderr.write(f"error: {message}{hint}\n")
        raise SystemExit(2)


def parser(prog: str, mode: str | None) -> argparse.ArgumentParser:
    """``mode`` None: chosen by a flag."""
    made = _Parser(prog=prog, allow_abbrev=False, description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    if mode is None:
        made.add_argument("--mode", choices=MODES, default=PREFILL_FIRST, help="who gets a request first")
    made.add_argument("--host", default="localhost", help="address to listen on")
    made.add_argument("--port", type=port, default=8000, help="port to listen on")
    for side in ("prefiller", "decoder"):
        made.add_argument(f"--{side}-hosts", f"--{side}-host", nargs="+", required=True, help=f"hosts of the {side}s")
        made.add_argument(
            f"--{side}-ports", f"--{side}-port", nargs="+", type=port, required=True, help="their ports, one for each host"
        )
    if mode != PREFILL_FIRST:
        made.add_argument("--metaserver-host", help="decode first: address that decoders call back (default: that of --host)")
        made.add_argument("--metaserver-port", type=free_port, default=0, help="decode first: its port; 0: any that is free")
    _add_limits(made)
    _add_deadlines(made)
    made.add_argument("--prefix-affinity", action="store_true", help="prompts that begin alike go to the same engines")
    made.add_argument("--require-auth", action="store_true", help=f"do not start off loopback without {SECRET_VARIABLE}")
    made.add_argument("--workers", type=int, default=1, help="accepted: 1, since one process holds all load scores")
    made.add_argument("--log-level", choices=LEVELS, default="info", type=str.lower, help="of the log on standard error")
    return made


def _add_limits(made: argparse.ArgumentParser) -> None:
    made.add_argument("--max-retries", type=natural, default=_LIMITS.retries, help="further tries to connect to an engine")
    made.add_argument(
        "--retry-delay", type=seconds, default=_LIMITS.retry_delay_s, help="seconds before the first of them, then doubled"
    )
    made.add_argument(
        "--max-waiting-retries", type=positive, default=3, help="tries to reach an instance that was added at run time"
    )
    made.add_argument("--waiting-retry-interval", type=seconds, default=10.0, help="seconds between them")
    made.add_argument("--max-concurrency", type=positive, default=_LIMITS.running, help="requests at once")
    made.add_argument(
        "--max-answers",
        type=positive,
        default=_LIMITS.answers,
        help="answers (prompts times samples) at once; each is one request to a prefiller and one to a decoder",
    )
    made.add_argument("--max-queue", type=natural, default=_LIMITS.queued, help="requests that wait for a place; beyond: 429")
    made.add_argument("--queue-timeout", type=deadline, default=_LIMITS.queue_s, help="seconds in the queue; beyond: 503")
    made.add_argument("--max-body-bytes", type=positive, default=_LIMITS.body_bytes, help="size of a request; beyond: 413")


def _add_deadlines(made: argparse.ArgumentParser) -> None:
    words = {
        "connect": "until an engine has accepted a connection",
        "body": "until a client has sent its request",
        "prefill": "until prefill has answered",
        "first-byte": "from the decode request to the first frame of a stream",
        "idle": "between two frames of a stream, and until the client has read one",
        "request": "for a request as a whole",
        "shutdown": "for running requests when told to end",
        "drain": "for running requests of an instance that is removed",
    }
    for name, text in words.items():
        default = getattr(_DEADLINES, name.replace("-", "_"))
        made.add_argument(f"--{name}-timeout", type=deadline, default=default, help=f"seconds {text}")
    made.add_argument("--health-interval", type=deadline, default=5.0, help="seconds between two probes of an engine that is well")


def read_flags(prog: str, given: Sequence[str], env: Mapping[str, str], mode: str | None = None) -> ProxyOptions:
    """The options. OptionError, or SystemExit 2 with one line, for what must not start."""
    parsed = parser(prog, mode).parse_args(given)
    chosen = mode or parsed.mode
    if parsed.workers != 1:
        raise OptionError(
            "--workers", parsed.workers, "accepted: 1; one process holds all load scores, and serves hundreds of streams"
        )
    options = ProxyOptions(
        mode=chosen,
        host=parsed.host if is_wildcard(parsed.host) else read_host("--host", parsed.host),
        port=parsed.port,
        prefillers=tuple(pair("--prefiller-hosts", parsed.prefiller_hosts, "--prefiller-ports", parsed.prefiller_ports)),
        decoders=tuple(pair("--decoder-hosts", parsed.decoder_hosts, "--decoder-ports", parsed.decoder_ports)),
        metaserver_host=_metaserver_host(parsed) if chosen == DECODE_FIRST else "",
        metaserver_port=parsed.metaserver_port if chosen == DECODE_FIRST else 0,
        limits=Limits(
            running=parsed.max_concurrency,
            answers=parsed.max_answers,
            queued=parsed.max_queue,
            queue_s=parsed.queue_timeout,
            retries=parsed.max_retries,
            retry_delay_s=parsed.retry_delay,
            body_bytes=parsed.max_body_bytes,
        ),
        deadlines=Deadlines(
            **{name: getattr(parsed, f"{name}_timeout") for name in ("connect", "body", "prefill", "first_byte")},
            **{name: getattr(parsed, f"{name}_timeout") for name in ("idle", "request", "shutdown", "drain")},
        ),
        give_up_s=parsed.max_waiting_retries * parsed.waiting_retry_interval,
        health_s=parsed.health_interval,
        affinity=parsed.prefix_affinity,
        log_level=parsed.log_level,
        require_auth=parsed.require_auth,
        secret=shared_secret(env),
        admin_token=env.get(ADMIN_TOKEN) or None,
        api_key=env.get(API_KEY) or None,
    )
    if options.require_auth and options.secret is None and options.remote:
        raise OptionError(
            "--require-auth", options.remote, f"these are not on loopback; set {SECRET_VARIABLE} on all engines and proxies"
        )
    return options


def _metaserver_host(parsed: argparse.Namespace) -> str:
    key, value = ("--metaserver-host", parsed.metaserver_host) if parsed.metaserver_host else ("--host", parsed.host)
    if is_wildcard(value):
        wanted = "an address of this host that decoders can reach" + (
            "" if parsed.metaserver_host else ", here or as --metaserver-host"
        )
        raise OptionError(key, value, f"decoders must call back, and cannot call a wildcard; accepted: {wanted}")
    return read_host(key, value)


def warnings(options: ProxyOptions) -> list[str]:
    """What the operator should know at start."""
    lines = []
    if options.secret is None and options.remote:
        lines.append(
            f"{SECRET_VARIABLE} is not set: messages between proxy and engines on {', '.join(options.remote)} are not signed"
        )
    far = [str(one) for one in options.decoders if not is_loopback(one.host)]
    if options.mode == DECODE_FIRST and far and is_loopback(options.metaserver_host):
        lines.append(f"decoders {', '.join(far)} cannot call back {options.metaserver_host}: set --metaserver-host")
    if not options.admin_open and options.admin_token is None:
        lines.append(f"/instances and /reset_prefix_cache are closed: {options.host} is not loopback and {ADMIN_TOKEN} is not set")
    return lines


def _number(kind: type[int] | type[float], text: str, low: float, high: float, words: str) -> float:
    try:
        value = kind(text)
    except ValueError:
        value = kind(low) - 1
    if not low <= value <= high:
        raise argparse.ArgumentTypeError(f"{text!r} is not {words}")
    return value


def port(text: str) -> int:
    return int(_number(int, text, 1, 65535, "a port from 1 to 65535"))


def free_port(text: str) -> int:
    return int(_number(int, text, 0, 65535, "a port from 0 to 65535"))


def natural(text: str) -> int:
    return int(_number(int, text, 0, 1 << 40, "an integer of at least 0"))


def positive(text: str) -> int:
    return int(_number(int, text, 1, 1 << 40, "an integer of at least 1"))


def deadline(text: str) -> float:
    return _number(float, text, 0.001, 1e7, "a number of seconds above 0")


def seconds(text: str) -> float:
    return _number(float, text, 0.0, 1e7, "a number of seconds of at least 0")
