"""One store, two engines: the first computes and stores, the second, freshly started, takes from the store what the first has
stored. In the second, hits in the store and hits on the device take turns, and so do the engines of stores that are compared."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from tests.engine.runner import Engine

from benchmarks.engines import Setup, engine, first_token, forget_device, prompt, warm_up
from benchmarks.machine import Memcpy
from benchmarks.models import BLOCK, Model
from benchmarks.report import median

SEED = 11


@dataclass
class Hits:
    """Seconds to the first token for prompts of one length. `rate`: memmove in bytes a second, measured between them."""

    cold_s: float = 0.0
    first_s: float = 0.0  # the very first hit of the new engine
    store_s: list[float] = field(default_factory=list)
    device_s: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    same: bool = True

    def add(self, other: Hits) -> None:
        """The turns of another run of the same."""
        self.store_s += other.store_s
        self.device_s += other.device_s
        self.same &= other.same

    @property
    def extra_s(self) -> float:
        return median(self.store_s) - median(self.device_s)


@dataclass(frozen=True)
class Stored:
    """What an engine has computed and left in the store of its setup: by length, the seconds to the first token and the answer."""

    setup: Setup
    cold: dict[int, tuple[float, list[int]]]


def fill(model: Model, setup: Setup, lengths: Sequence[int]) -> Stored:
    """Compute prompts of these lengths with an engine that ends then."""
    cold = {}
    with engine(model, setup, max(lengths), sum(lengths) + len(lengths) * BLOCK) as first:
        warm_up(first, model)
        for tokens in lengths:
            seconds, _, answer = first_token(first, prompt(model, tokens, SEED))
            cold[tokens] = seconds, answer
    return Stored(setup, cold)


def take_turns(model: Model, stored: Sequence[Stored], rounds: int) -> list[dict[int, Hits]]:
    """TTFT by length, of one fresh engine for each store, all of them up at once. RuntimeError when one does not hit."""
    found = [{tokens: Hits(cold_s=seconds) for tokens, (seconds, _) in one.cold.items()} for one in stored]
    longest = max(max(one.cold) for one in stored)
    memcpy = Memcpy(min(longest * model.token_bytes, 256 << 20), model.page_bytes)
    with ExitStack() as up:
        engines = [up.enter_context(engine(model, one.setup, longest, longest)) for one in stored]
        for running in engines:
            warm_up(running, model, seed=998)
        for turn in range(rounds):
            # The first round maps memory for the first time: reported on its own.
            kept = turn > 0 or rounds == 1
            for running, one, hits in zip(engines, stored, found, strict=True):
                if len(engines) > 1:
                    warm_up(running, model, seed=998)  # it has been idle
                for tokens in one.cold:
                    _ask(running, model, one, tokens, hits[tokens], kept)
                    if kept:
                        hits[tokens].rates.append(memcpy.rate())
    return found


def _ask(running: Engine, model: Model, stored: Stored, tokens: int, hits: Hits, kept: bool) -> None:
    """Once from the store, once from the device."""
    forget_device(running)
    asked = prompt(model, tokens, SEED)
    store_s, cached, told = first_token(running, asked)
    if cached < tokens * 3 // 4:
        raise RuntimeError(f"{stored.setup.name}: {cached} of {tokens} tokens came from the store")
    device_s, _, _ = first_token(running, asked)
    hits.first_s = hits.first_s or store_s
    hits.same &= told == stored.cold[tokens][1]
    if kept:
        hits.store_s.append(store_s)
        hits.device_s.append(device_s)


def measure(model: Model, setup: Setup, lengths: Sequence[int], rounds: int) -> dict[int, Hits]:
    """One store alone."""
    return take_turns(model, [fill(model, setup, lengths)], rounds)[0]
