"""What the zero-hit alarm knows: the pool as it is now, and who else is in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from vllm.logger import init_logger

from kvpool.core.diagnosis import Diagnosis, Evidence, diagnose
from kvpool.engine.agreement import Agreement
from kvpool.engine.opening import store_line
from kvpool.engine.setup import EngineSetup
from kvpool.stores.base import Store, StoreStats

logger = init_logger("vllm.kvpool")

T = TypeVar("T")


class ZeroHitAlarm:
    """``offered`` counts what this engine may have saved; ``explain`` asks the store: not for the engine's thread."""

    def __init__(self, setup: EngineSetup, store: Store, agreement: Agreement) -> None:
        self._setup = setup
        self._store = store
        self._agreement = agreement
        self._offered = 0

    def offered(self, objects: int) -> None:
        """So many objects are about to be put: told before the store has any of them."""
        self._offered += objects

    def explain(self, lookups: int, unknown: int) -> Diagnosis:
        """A store that fails here is no reason to keep silent."""
        records: dict[str, str] = _answer(lambda: self._agreement.records(self._store), {})
        picture = _answer(self._store.stats, StoreStats())
        inputs = self._agreement.inputs
        return diagnose(
            Evidence(
                namespace=self._agreement.namespace,
                inputs=inputs.to_json() if inputs is not None else "",
                records=records,
                pool_objects=_objects(picture, self._store.capabilities.mapped),
                own_objects=self._offered if self._setup.saves else None,  # read after the picture: never too few
                block_size=max(group.block_size for group in self._setup.groups),
                store=store_line(self._setup),
                lookups=lookups,
                unknown=unknown,
                min_hit_tokens=self._setup.options.min_hit_tokens,
            )
        )


def _answer(ask: Callable[[], T], without: T) -> T:
    try:
        return ask()
    except Exception as error:  # noqa: BLE001 - the alarm names the store, whatever it cannot say
        logger.debug("kvpool: the store tells the zero-hit alarm nothing: %s", error)
        return without


def _objects(picture: StoreStats, mapped: bool) -> int | None:
    """Different objects in all tiers, at least; None where the store cannot count, or did not."""
    most = max((tier.objects for tier in picture.tiers), default=picture.objects)
    return most or (0 if mapped and picture.capacity_bytes else None)
