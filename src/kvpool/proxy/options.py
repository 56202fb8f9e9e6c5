"""What a proxy is started with."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvpool.options.addresses import is_loopback
from kvpool.proxy.addresses import Address

PREFILL_FIRST, DECODE_FIRST = "prefill-first", "decode-first"
MODES = (PREFILL_FIRST, DECODE_FIRST)


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Seconds. No wait is without one."""

    connect: float = 5.0
    body: float = 60.0  # until the client has sent its whole request
    prefill: float = 600.0
    first_byte: float = 600.0  # from the decode request to the first frame of a stream
    idle: float = 300.0  # between two frames, and until the client has read one
    request: float = 7200.0
    shutdown: float = 30.0
    drain: float = 600.0


@dataclass(frozen=True, slots=True)
class Limits:
    """``running`` and ``queued``: requests; ``answers``: prompts times samples that are served at once; ``retries``: further tries
    to connect, ``retry_delay_s`` before the first of them."""

    running: int = 512
    answers: int = 1024
    queued: int = 512
    queue_s: float = 30.0
    retries: int = 3
    retry_delay_s: float = 0.001
    body_bytes: int = 64 << 20
    answer_bytes: int = 256 << 20


@dataclass(frozen=True, slots=True)
class ProxyOptions:
    """``give_up_s``: how long an instance that is added at run time may take to answer for the first time."""

    mode: str
    host: str
    port: int
    prefillers: tuple[Address, ...]
    decoders: tuple[Address, ...]
    metaserver_host: str = "127.0.0.1"
    metaserver_port: int = 0
    limits: Limits = field(default_factory=Limits)
    deadlines: Deadlines = field(default_factory=Deadlines)
    give_up_s: float = 30.0
    health_s: float = 5.0
    affinity: bool = False
    log_level: str = "info"
    require_auth: bool = False
    secret: bytes | None = None
    admin_token: str | None = None
    api_key: str | None = None  # for engines, where a client sends none

    @property
    def remote(self) -> list[str]:
        """What of all this can be reached from other hosts, or lies on them."""
        callback = [self.metaserver_host] if self.mode == DECODE_FIRST else []
        hosts = [self.host, *callback, *(one.host for one in self.prefillers + self.decoders)]
        return [host for host in dict.fromkeys(hosts) if not is_loopback(host)]

    @property
    def admin_open(self) -> bool:
        """Administration without a token: on a loopback address only."""
        return is_loopback(self.host)
