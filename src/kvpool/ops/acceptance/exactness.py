"""With the pool every answer is, token for token, that of an engine without it; and the pool is used."""

from __future__ import annotations

from kvpool.ops.acceptance.asking import Asking
from kvpool.ops.acceptance.book import Task, Wrong
from kvpool.ops.acceptance.client import HIT_TOKENS
from kvpool.ops.acceptance.expected import SHARED

PART = "exactness"


def first_engine(asking: Asking, loads: str) -> list[Task]:
    """The first engine on an empty pool."""
    return [
        Task(f"cold ({loads})", lambda: _cold(asking)),
        Task(f"asked again, hit on the device ({loads})", lambda: _again(asking)),
        Task(f"another prompt with the same beginning ({loads})", lambda: _begins_alike(asking)),
        *_after_a_reset(asking, loads),
    ]


def second_engine(asking: Asking, loads: str) -> list[Task]:
    """An engine started after the first was ended; it has never seen the prompts."""
    return [
        Task(f"hit in the pool after a restart ({loads})", lambda: asking.hit("first")),
        Task(f"a new prompt with a stored beginning ({loads})", lambda: asking.hit("later", SHARED)),
        *_after_a_reset(asking, loads),
    ]


def _after_a_reset(asking: Asking, loads: str) -> list[Task]:
    return [
        Task(f"hit in the pool after the engine's cache was emptied ({loads})", lambda: _both(asking)),
        Task(f"another cache_salt does not hit ({loads})", lambda: asking.no_hit("first", f"somebody else, {loads}")),
    ]


def _cold(asking: Asking) -> str:
    before = asking.settled(HIT_TOKENS)
    asking.right("first")
    if found := asking.settled(HIT_TOKENS) - before:
        raise Wrong(f"the pool was new and supplied {found} tokens")
    return "nothing to hit, same tokens"


def _again(asking: Asking) -> str:
    kept, wanted = asking.right("first").cached, asking.expected.kept["first"]
    if kept is not None and kept < wanted:
        raise Wrong(f"the answer is right, but the engine had {kept} tokens of the prompt; without the pool it has {wanted}")
    return f"same tokens; the engine had {kept} of the prompt"


def _begins_alike(asking: Asking) -> str:
    asking.right("partial")
    return "same tokens"


def _both(asking: Asking) -> str:
    asking.hit("partial")
    return asking.hit("first")
