"""Engines and stores that are killed, stopped or taken away: what is left answers right, does not hang, and hits again."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from kvpool.ops.acceptance.asking import Asking
from kvpool.ops.acceptance.book import Task, Unseen, Wrong
from kvpool.ops.acceptance.client import Client
from kvpool.ops.acceptance.engines import POOL, Engine, Engines
from kvpool.ops.acceptance.expected import ANEW, KILLED, flood

PART = "kill list"
SAVING_S, RECOVERED_S = 60.0, 60.0
FLOODS, FLOOD_TOKENS = 3, 900
SAVED = "kvpool:saved_blocks_total"
STORED, WHILE_STOPPED, WHILE_KILLED, WHILE_GONE = KILLED


@dataclass(frozen=True, slots=True)
class Scene:
    """``kept`` has short deadlines and is not harmed; ``victim`` is. ``anew`` is started when the store has been replaced."""

    engines: Engines
    kept: Engine
    victim: Engine
    anew: Engine
    asking: Callable[[Engine], Asking]


def tasks(scene: Scene) -> list[Task]:
    made = [
        Task("an engine hits what another one beside it has stored", lambda: _shared(scene)),
        Task("an engine stopped (SIGSTOP) in the middle of saves", lambda: _stopped(scene), seconds=20),
        Task("an engine killed (kill -9) in the middle of saves", lambda: _killed(scene), seconds=20),
    ]
    if not scene.engines.service:
        made.append(Task("after that every slot of the pool is accounted for", lambda: _verified(scene)))
    made.append(Task("the killed engine started again", lambda: _restarted(scene), seconds=60))
    if scene.engines.service:
        made += [
            Task("the store's service stopped (SIGSTOP), then going on", lambda: _service_stopped(scene), seconds=30),
            Task("the store's service killed (kill -9)", lambda: _service_killed(scene), seconds=20),
        ]
    else:
        made.append(Task("the pool's directory removed while engines use it", lambda: _removed(scene), seconds=20))
    return [*made, Task("a new engine with a new pool", lambda: _anew(scene), seconds=60)]


def _shared(scene: Scene) -> str:
    _store(scene, STORED)
    return scene.asking(scene.victim).hit(STORED)


def _stopped(scene: Scene) -> str:
    kept = scene.asking(scene.kept)
    with saving(scene.victim.client):
        scene.engines.stop(scene.victim)
        try:
            answered = kept.in_time(WHILE_STOPPED)
            seen = kept.hit(STORED)
        finally:
            scene.engines.go_on(scene.victim)
    scene.asking(scene.victim).right(WHILE_STOPPED)
    return f"the other engine meanwhile: {answered}, {seen}; the stopped one goes on"


def _killed(scene: Scene) -> str:
    kept = scene.asking(scene.kept)
    with saving(scene.victim.client):
        scene.engines.kill(scene.victim)
    return f"the other engine goes on: {kept.in_time(WHILE_KILLED)}, {kept.hit(STORED)}"


def _verified(scene: Scene) -> str:
    from kvpool.stores.local import LocalStore

    pool = LocalStore(scene.engines.root, POOL)
    pool.open()
    try:
        findings = pool.verify()
    finally:
        pool.close()
    if findings:
        raise Wrong(f"{len(findings)} findings, the first: {findings[0]}")
    return "no findings"


def _restarted(scene: Scene) -> str:
    scene.kept.client.empty_cache()  # its saves are over
    scene.engines.start(scene.victim)
    victim = scene.asking(scene.victim)
    victim.hit(STORED)
    return victim.hit(WHILE_KILLED)


def _removed(scene: Scene) -> str:
    """Both engines still have the pool's memory; what they are asked anew they cannot store."""
    kept, victim = scene.asking(scene.kept), scene.asking(scene.victim)
    for engine in (scene.kept, scene.victim):
        engine.client.empty_cache()
    shutil.rmtree(scene.engines.root / POOL)
    return "; ".join(asking.in_time(STORED, WHILE_GONE) for asking in (kept, victim))


def _service_stopped(scene: Scene) -> str:
    kept = scene.asking(scene.kept)
    kept.client.empty_cache()
    scene.engines.stop_service()
    try:
        answered = kept.in_time(STORED, WHILE_GONE)
    finally:
        scene.engines.service_goes_on()
    end = time.monotonic() + RECOVERED_S
    while True:
        try:
            return f"{answered}; then {kept.hit(STORED)}"
        except Wrong:
            if time.monotonic() > end:
                raise
        kept.client.empty_cache()
        kept.right(STORED)


def _service_killed(scene: Scene) -> str:
    kept = scene.asking(scene.kept)
    kept.client.empty_cache()
    scene.engines.kill_service()
    return kept.in_time(STORED, WHILE_GONE)


def _anew(scene: Scene) -> str:
    for engine in (scene.victim, scene.kept):
        scene.engines.end(engine)
    if scene.engines.service:
        scene.engines.start_service_anew()
    scene.engines.start(scene.anew)
    asking = scene.asking(scene.anew)
    asking.right(ANEW[0])
    return asking.hit(ANEW[0])


def _store(scene: Scene, name: str) -> None:
    scene.asking(scene.kept).right(name)
    scene.kept.client.empty_cache()


@contextmanager
def saving(client: Client) -> Iterator[None]:
    """Within the block the engine computes prompt after prompt and has begun to store them. Its answers do not matter."""
    over = threading.Event()
    before = client.count(SAVED)

    def ask(number: int) -> None:
        while not over.is_set():
            with suppress(OSError):
                client.ask(flood(number, FLOOD_TOKENS), max_tokens=4)
            number += FLOODS

    threads = [threading.Thread(target=ask, args=(number,), daemon=True) for number in range(FLOODS)]
    for thread in threads:
        thread.start()
    try:
        if client.count_until(SAVED, before + 1, SAVING_S) <= before:
            raise Unseen("the engine stores nothing of what it computes")
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join(client.answer_s)
