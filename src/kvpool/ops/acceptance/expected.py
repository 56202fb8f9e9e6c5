"""Prompts, and what the engine without the pool answers to them."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping

from kvpool.ops.acceptance.book import Wrong
from kvpool.ops.acceptance.client import Answer, Client
from kvpool.ops.warmup import TOKEN_IDS

SHARED, TAIL, SHORT = 640, 90, 384
ALIKE = ("first", "partial", "later")  # these begin with the same SHARED tokens
FAULTY = ("fault 1", "fault 2", "fault 3", "fault 4", "fault 5", "fault 6", "fault 7")
KILLED = ("kill 1", "kill 2", "kill 3", "kill 4")
ANEW = ("anew",)


def prompts() -> dict[str, list[int]]:
    """By name, in the order in which every engine is asked: how a prompt is split depends on what was asked before."""
    made = {name: [*_tokens("shared", SHARED), *_tokens(name, TAIL)] for name in ALIKE}
    made |= {name: _tokens(name, SHORT + TAIL) for name in (*FAULTY, *KILLED, *ANEW)}
    return made


def flood(number: int, tokens: int) -> list[int]:
    """A prompt whose answer does not matter."""
    return _tokens(f"flood {number}", tokens)


def _tokens(name: str, count: int) -> list[int]:
    return random.Random(name).choices(TOKEN_IDS, k=count)


class Expected:
    """Right answers. A prompt has up to two: as computed at once, and as computed behind what the engine had kept of it. They are
    equal where arithmetic does not depend on how a prompt is split. ``kept``: tokens of a prompt that this engine had when it was
    asked again."""

    def __init__(self, right: Mapping[str, Collection[tuple[int, ...]]], kept: Mapping[str, int]) -> None:
        self._right, self.kept = right, kept
        self.prompts = prompts()

    @property
    def split_matters(self) -> int:
        """Prompts for which the two differ."""
        return sum(len(set(answers)) > 1 for answers in self._right.values())

    def judge(self, name: str, answer: Answer) -> None:
        """``Wrong``, without a token, where it is not one of the right ones."""
        right = self._right[name]
        if answer.token_ids in right:
            return
        places = [_first_difference(answer.token_ids, other) for other in right]
        raise Wrong(
            f"wrong answer: token {max(places) + 1} of {len(answer.token_ids)} is not what the engine without the pool says"
        )


def ask_reference(client: Client) -> Expected:
    """Ask everything twice. ``Wrong`` where answers are so alike that comparing them would prove nothing."""
    answers = {name: (client.ask(prompt), client.ask(prompt)) for name, prompt in prompts().items()}
    right = {name: (cold.token_ids, again.token_ids) for name, (cold, again) in answers.items()}
    kinds = {cold for cold, _ in right.values()}
    if len(kinds) * 2 < len(right):
        raise Wrong(f"the model gives {len(kinds)} different answers to {len(right)} prompts: comparing them would prove nothing")
    return Expected(right, {name: again.cached or 0 for name, (_, again) in answers.items()})


def _first_difference(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    return next(
        (place for place, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), min(len(one), len(other))
    )
