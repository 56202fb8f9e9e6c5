"""One store, two engines: the first computes and stores, the second, freshly started, takes from the store what the first has
stored. In the second, hits in the store and hits on the device take turns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

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

    @property
    def extra_s(self) -> float:
        return median(self.store_s) - median(self.device_s)


def measure(model: Model, setup: Setup, lengths: Sequence[int], rounds: int) -> dict[int, Hits]:
    """TTFT by length. RuntimeError when the second engine does not hit what the first has stored."""
    found = {tokens: Hits() for tokens in lengths}
    answers = {}
    with engine(model, setup, max(lengths), sum(lengths) + len(lengths) * BLOCK) as first:
        warm_up(first, model)
        for tokens, hits in found.items():
            hits.cold_s, _, answers[tokens] = first_token(first, prompt(model, tokens, SEED))
    memcpy = Memcpy(min(max(lengths) * model.token_bytes, 256 << 20), model.page_bytes)
    with engine(model, setup, max(lengths), max(lengths)) as second:
        warm_up(second, model, seed=998)
        for turn in range(rounds):
            for tokens, hits in found.items():
                forget_device(second)
                asked = prompt(model, tokens, SEED)
                store_s, cached, answer = first_token(second, asked)
                if cached < tokens * 3 // 4:
                    raise RuntimeError(f"{setup.name}: {cached} of {tokens} tokens came from the store")
                device_s, _, _ = first_token(second, asked)
                hits.first_s = hits.first_s or store_s
                hits.same &= answer == answers[tokens]
                if turn or rounds == 1:  # the first round maps memory for the first time: reported on its own
                    hits.store_s.append(store_s)
                    hits.device_s.append(device_s)
                    hits.rates.append(memcpy.rate())
    return found
