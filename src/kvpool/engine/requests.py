"""What the scheduler side remembers of a request while it lives."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvpool.engine.lookup import Found, Lookup
from kvpool.engine.threads import Ticket

if TYPE_CHECKING:
    from vllm.v1.request import Request


@dataclass
class RequestState:
    """``offered[g]`` is how many leading blocks of group g need not be offered for saving again."""

    request: Request
    lookup: Lookup | None = None
    found: Found | None = None  # the answer of ``lookup``, its lease still ours
    computed: int = 0  # tokens the engine held by itself when it was last asked
    load_job: int | None = None
    loads_failed: int = 0  # since it last computed something
    gave_up: bool = False  # its lookup took too long, in this admission
    offered: list[int] = field(default_factory=list)
    adapter: Ticket[str | None] | None = None  # digest of its adapter's files, when there is one
    waiting_since: float | None = None
    look_again_at: float = 0.0
    seen_unsaved: int = 0  # how far it has looked through the blocks that were offered in vain
    # KV of before a cache reset: it may be used by this request, never stored
    stale: bool = False
    sources: dict[str, int] = field(default_factory=dict)  # tokens of its last hit, by tier
    outcome: tuple[int, int, str] | None = None  # of its lookup, not counted yet: tokens asked for, tokens found, reason
