"""Random lives of requests, by seed: shared prefixes, aborts, preemptions, evictions, failures, late transfers."""

from __future__ import annotations

import random
from dataclasses import dataclass

from vllm.v1.request import RequestStatus

from kvpool.stores.base import Result, Status
from tests.contract.fakestore import FakeStore
from tests.contract.harness import Harness

FAULTS = (Status.MISSING, Status.TRANSIENT, Status.FATAL)


@dataclass(frozen=True)
class Chances:
    """Per round, but for ``get`` and ``put``: per key; and ``held``: whether transfers wait at all."""

    abort: float = 0.05
    preempt: float = 0.05
    evict: float = 0.1
    forget_local: float = 0.05
    get: float = 0.03
    put: float = 0.03
    held: bool = False
    new_weights: float = 0.0


class Fuzz:
    """Drives one engine; every answer, every read block and every stored object is checked on the way."""

    def __init__(self, engine: Harness, seed: int, chances: Chances = Chances()) -> None:
        self.engine = engine
        self.random = random.Random(seed)
        self.chances = chances
        self.store: FakeStore = engine.store
        self.added = 0
        self.trunks = [[self.random.randrange(1000) for _ in range(140)] for _ in range(5)]
        if chances.get:
            self.store.rules["get"] = self._fault(chances.get)
        if chances.put:
            self.store.rules["put"] = self._fault(chances.put)
        if chances.held:
            self.store.hold |= {"get", "put"}

    def _fault(self, chance: float):
        def rule(key: bytes) -> Result | None:
            return Result(self.random.choice(FAULTS)) if self.random.random() < chance else None

        return rule

    def prompt(self) -> list[int]:
        """A piece of a trunk and one of a few tails: many prefixes are shared, some prompts are equal."""
        stem = self.random.choice(self.trunks)[: self.random.choice((0, 15, 16, 17, 40, 64, 100, 128))]
        tail = [5000 + self.random.randrange(3)] * self.random.choice((1, 1, 5, 33))
        return stem + tail

    def add(self) -> None:
        self.engine.add(f"r{self.added}", self.prompt(), self.random.choice((1, 1, 2, 9)))
        self.added += 1

    def round(self) -> None:
        """One thing or another, then a step."""
        engine, chance = self.engine, self.random.random
        live = list(engine.scheduler.requests)
        if live and chance() < self.chances.abort:
            name = self.random.choice(live)
            # vLLM handles aborts before a step, and between its forward and the update of the scheduler.
            engine.during.append(lambda: engine.abort(name)) if chance() < 0.5 else engine.abort(name)
        if engine.scheduler.running and chance() < self.chances.preempt:
            engine.preempt(self.random.choice(engine.scheduler.running).request_id)
        if chance() < self.chances.evict:
            self.store.evict(self.random.sample(list(self.store.objects), len(self.store.objects) // 3))
        if chance() < self.chances.forget_local:
            idle = {b.block_id for b in engine.blocks.blocks if b.ref_cnt == 0}
            engine.blocks.evict_blocks(idle)  # as if others had needed the room
        if chance() < self.chances.new_weights:
            # While a load is under way, for a request that lives or one that is gone, vLLM cannot reset with running requests.
            unable = (RequestStatus.WAITING_FOR_REMOTE_KVS, RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_ERROR)
            loading = any(r.status in unable for r in engine.scheduler.requests.values())
            engine.new_weights(reset_running=not loading and chance() < 0.5)
        if self.chances.held and chance() < 0.3:
            self.store.finish_held()
        engine.step()

    def run(self, requests: int, concurrency: int = 6) -> None:
        while self.added < requests or self.engine.scheduler.requests:
            while self.added < requests and len(self.engine.scheduler.requests) < concurrency and self.random.random() < 0.7:
                self.add()
            self.round()
            if self.engine.steps > 400 + 60 * requests:
                raise AssertionError(f"no progress: {list(self.engine.scheduler.requests)}")

    def finish(self) -> None:
        """Nothing fails from now on; what is under way ends."""
        self.store.rules.clear()
        self.store.hold.clear()
        self.store.finish_held()
        self.engine.settle()
