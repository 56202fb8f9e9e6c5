"""What prefill and decode say to each other. Every message is bounded, typed and signed; see channel.py for the envelope."""

from __future__ import annotations

from typing import TypeAlias

from msgspec import Struct, field

PROTOCOL = 4
"""Both sides must speak the same; raise it with every change below."""


class PageLayout(Struct, frozen=True, array_like=True):
    """The pages of one layer's tensor: block b's page is ``nbytes`` bytes at ``base + b * stride``."""

    layer: int
    name: str
    base: int
    stride: int
    nbytes: int


class SpanLayout(Struct, frozen=True, array_like=True):
    """A shard of one KV-cache group on one rank, as in core/layout.py. ``head_major``: a page is its heads, one after another."""

    group: int
    first_head: int
    last_head: int
    note: str
    replica: int
    replicas: int
    head_major: bool
    pages: tuple[PageLayout, ...]


class RankLayout(Struct, frozen=True):
    """All of one rank's KV memory, and how to reach it."""

    rank: int
    spans: tuple[SpanLayout, ...]
    address: bytes = b""


# ---- decode asks --------------------------------------------------------------------------------------------------------------


class Hello(Struct, frozen=True, tag="hello"):
    """Once per peer. ``record`` is the namespace record; ``pool`` names the pool beside the transfer, if there is one."""

    record: str
    readers: int
    engine: str
    pool: dict[str, str] = field(default_factory=dict)


class Begin(Struct, frozen=True, tag="begin"):
    """Reader ``reader`` of a pull is about to read; ``prompt`` is the digest of what it wants the KV of. ``pull`` is random, the
    same for all readers of one decode engine: the first that begins owns the transfer."""

    transfer_id: str
    instance: str
    pull: str
    reader: int
    prompt: str


class End(Struct, frozen=True, tag="end"):
    """The reader has read, or given up."""

    transfer_id: str
    instance: str
    pull: str
    reader: int


class Release(Struct, frozen=True, tag="release"):
    """Nobody will read this transfer. ``pull``: that of a pull which has failed and whose readers have all returned, so that the
    transfer ends although they had begun; empty where nobody began. ``force``: it ends whoever has begun, since nobody wants what
    is read: a reader that is still at it learns so at its end."""

    transfer_id: str
    instance: str
    reason: str
    pull: str = ""
    force: bool = False


Request: TypeAlias = Hello | Begin | End | Release

# ---- prefill answers ----------------------------------------------------------------------------------------------------------


class Welcome(Struct, frozen=True, tag="welcome"):
    """We understand each other. ``instance`` changes with every start of the prefill side."""

    instance: str
    ranks: tuple[RankLayout, ...]
    pool: dict[str, str] = field(default_factory=dict)


class Ready(Struct, frozen=True, tag="ready"):
    """Read now: ``tables[g][i]`` is where block i of group g lies, 0 where there is nothing."""

    tables: tuple[tuple[int, ...], ...]


class Wait(Struct, frozen=True, tag="wait"):
    """Not yet; ask again."""


class Held(Struct, frozen=True, tag="held"):
    """What the reader has read was unchanged all the time; or: released."""


class Gone(Struct, frozen=True, tag="gone"):
    """There is no such transfer (any more): what was read of it is worth nothing."""

    reason: str


class Refused(Struct, frozen=True, tag="refused"):
    """We cannot work together, or the message makes no sense."""

    reason: str


Reply: TypeAlias = Welcome | Ready | Wait | Held | Gone | Refused
