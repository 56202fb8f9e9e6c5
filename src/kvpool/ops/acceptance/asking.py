"""Judgements that all parts share: a right answer, a hit that the counters confirm, no hit."""

from __future__ import annotations

import time
from dataclasses import dataclass

from kvpool.ops.acceptance.book import Unseen, Wrong
from kvpool.ops.acceptance.client import HIT_TOKENS, Answer, Client
from kvpool.ops.acceptance.expected import Expected

LATE_S = 20.0  # how long an answer may take while something is broken, deadlines and breakers included
SETTLED_S = 0.5  # the counters of a step come after its answer


@dataclass(frozen=True, slots=True)
class Asking:
    """``tries``: how often a hit is waited for. A store behind other processes may be late on a busy machine, which is a miss, not
    a failure; its answers must be right each time."""

    client: Client
    expected: Expected
    tries: int = 1

    def right(self, name: str, salt: str | None = None) -> Answer:
        """The answer, which is right."""
        answer = self.client.ask(self.expected.prompts[name], salt)
        self.expected.judge(name, answer)
        return answer

    def in_time(self, *names: str) -> str:
        """Right, and none later than ``LATE_S``: for the time in which something is broken."""
        slowest = max(self.right(name).seconds for name in names)
        if slowest > LATE_S:
            raise Wrong(f"right, but only after {slowest:.1f} s (at most {LATE_S:g} s are allowed)")
        return f"right after {slowest:.1f} s"

    def hit(self, name: str, tokens: int | None = None) -> str:
        """Right, and ``tokens`` of the prompt (default: all whole blocks) come from the pool; the engine's own cache is emptied."""
        block = self.client.block_size()
        prompt = self.expected.prompts[name]
        wanted = ((len(prompt) - 1) if tokens is None else tokens) // block * block
        best = 0
        for _ in range(self.tries):
            self.client.empty_cache()
            before = self.settled(HIT_TOKENS)
            self.right(name)
            best = max(best, self.client.count_until(HIT_TOKENS, before + wanted) - before)
            if best >= wanted > 0:
                return f"{best} of {len(prompt)} tokens from the pool"
        raise Unseen(f"the answer is right, but the pool supplied {best} tokens where it has {wanted}")

    def no_hit(self, name: str, salt: str) -> str:
        """Right, and computed: neither the engine nor the pool has anything under this salt."""
        before = self.settled(HIT_TOKENS)
        answer = self.right(name, salt)
        found = self.settled(HIT_TOKENS) - before
        if found or answer.cached:
            raise Wrong(f"{max(found, answer.cached or 0)} tokens were taken from what was stored under another salt")
        return "no hit"

    def settled(self, counter: str) -> int:
        time.sleep(SETTLED_S)
        return self.client.count(counter)
