"""What all ranks of an engine agree on: the namespace, and the shards that a block consists of."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue

from vllm.logger import init_logger

from kvpool.core.keys import key_prefix, namespace_prefix
from kvpool.core.namespace import NamespaceInputs
from kvpool.engine.messages import RankInfo
from kvpool.options.record import StoreRecord, difference
from kvpool.stores.base import Store

logger = init_logger("vllm.kvpool")

NOTES = b"v1:note:namespace:"
STORE_NOTES = b"v1:note:store:"


@dataclass(frozen=True)
class ShardKeys:
    """The keys of one shard: their prefix, and how long its objects are."""

    prefix: bytes
    nbytes: int


@dataclass(frozen=True)
class Space:
    """Where the KV of some requests lives: ``shards[g]`` are the shards of a block of group g."""

    namespace: str
    shards: tuple[tuple[ShardKeys, ...], ...]


class Agreement:
    """Collects the handshakes of ``world_size`` ranks; once all have come and agree, ``settle`` makes the namespace.

    ``hash_probe`` names the hash algorithm and the hash of a fixed token list. ``host`` is this host, for a store that reaches
    only one. ``store`` says which pool the scheduler looks into.
    """

    def __init__(
        self,
        world_size: int,
        num_groups: int,
        hash_probe: Callable[[], str],
        host: str,
        host_bound: bool,
        store: StoreRecord = StoreRecord(""),  # noqa: B008 - immutable
    ) -> None:
        self._store = store
        self._world_size = world_size
        self._num_groups = num_groups
        self._hash_probe = hash_probe
        self._host = host
        self._host_bound = host_bound
        self._ranks: dict[int, RankInfo] = {}
        self._epoch = "0"
        self._spaces: dict[str, Space] = {}
        self._notes: SimpleQueue[tuple[bytes, str]] = SimpleQueue()  # from the thread that asks the store to the engine's
        self.inputs: NamespaceInputs | None = None
        self.namespace = ""

    @property
    def ready(self) -> bool:
        return bool(self.namespace)

    def add(self, rank: RankInfo) -> bool:
        """True, once, when the last rank has come. RuntimeError naming the field where the ranks of one engine disagree, or the
        hosts where they may not differ."""
        if self.ready:
            return False
        if self._host_bound and rank.host != self._host:
            raise RuntimeError(
                "kvpool: the local store serves one host, and this engine's ranks are on several: use another backend"
            )
        if differs := difference(self._store, rank.store):
            logger.warning("kvpool: rank %d uses another pool than the scheduler: %s", rank.rank, differs)
        before = len(self._ranks)
        self._ranks[rank.rank] = rank
        if len(self._ranks) < self._world_size:
            return False
        self._merged()  # disagreement is an error now, not at the first request
        return before < self._world_size

    def settle(self) -> bool:
        """Make the namespace, once: True when it has just been made. Only when requests come does vLLM know its hash seed."""
        if self.ready or len(self._ranks) < self._world_size:
            return False
        private = next((r.sharing for r in self._ranks.values() if r.sharing), "")
        if private and self._epoch == "0":
            self._epoch = f"private-{secrets.token_hex(8)}"
            logger.warning("kvpool: this engine shares its KV with no other and not across restarts: %s", private)
        self._adopt(replace(self._merged(), hash_probe=self._hash_probe(), epoch=self._epoch))
        return True

    def space(self, adapter: str = "") -> Space:
        """The space of requests without (``""``) or with an adapter, which is named by the digest of its files."""
        found = self._spaces.get(adapter)
        if found is None:
            mixed = hashlib.sha256(f"{self.namespace}:{adapter}".encode()).hexdigest()[:16]
            found = self._spaces[adapter] = self._space(mixed)
        return found

    def owns(self, namespace: str) -> bool:
        """Whether this is one of the namespaces in use now, as opposed to one of before a reset."""
        return any(space.namespace == namespace for space in self._spaces.values())

    def raise_epoch(self) -> str:
        """Move to an empty namespace that no other engine can have; returns the old one if it was ours alone, else "".

        Why random: after an update of weights in place, only this engine knows what its KV was computed with. A counter would
        let an engine with other weights arrive at the same number.
        """
        old = self.namespace if self._epoch != "0" else ""
        self._epoch = f"reset-{secrets.token_hex(8)}"
        if self.inputs is not None:
            self._adopt(replace(self.inputs, epoch=self._epoch))
            logger.info("kvpool: cache reset, namespace is now %s (of this engine alone until it restarts)", self.namespace)
        return old

    def clear(self, store: Store, namespace: str) -> None:
        """Make room: remove what an old namespace of this engine alone holds, where the store can."""
        if namespace and store.capabilities.listable:
            store.clear(namespace_prefix(namespace))

    def introduce(self, store: Store) -> None:
        """Tell the log who we are, and the pool. Asks the store: not for the engine's thread."""
        logger.info("kvpool: namespace %s is of %s", self.namespace, self.inputs.to_json() if self.inputs is not None else "")
        self._note(store)

    def _note(self, store: Store) -> None:
        """Leave our namespace's inputs in the pool, so that an engine that shares nothing can be told which field differs."""
        if self.inputs is not None and self._epoch == "0":
            self._notes.put((NOTES + self.namespace.encode(), self.inputs.to_json()))
            self._compare(store)

    def _compare(self, store: Store) -> None:
        """Leave word how we reach this pool, and tell where another engine reaches it otherwise: sooner or later one of them will
        not."""
        ours = json.dumps([self._store.kind, self._store.endpoint, self._store.tenant])
        for text in store.notes(STORE_NOTES).values():
            theirs = StoreRecord(*json.loads(text))
            if differs := difference(self._store, theirs):
                logger.warning("kvpool: another engine reaches this pool otherwise: %s", differs)
                return
        self._notes.put((STORE_NOTES + hashlib.sha256(ours.encode()).hexdigest()[:16].encode(), ours))

    def take_notes(self) -> dict[bytes, str]:
        """What a worker is to leave in the pool, once."""
        notes = {}
        with suppress(Empty):
            while True:
                name, text = self._notes.get_nowait()
                notes[name] = text
        return notes

    def records(self, store: Store) -> dict[str, str]:
        """The namespaces noted in the pool and their inputs. Asks the store: not for the engine's thread."""
        return {key.removeprefix(NOTES).decode(): text for key, text in store.notes(NOTES).items()}

    def _merged(self) -> NamespaceInputs:
        ranks = [self._ranks[r] for r in sorted(self._ranks)]
        widths = tuple(sorted({w for r in ranks for w in r.inputs.token_head_bytes}))
        merged = [replace(r.inputs, token_head_bytes=widths) for r in ranks]
        for rank, inputs in zip(ranks, merged, strict=True):
            for name in NamespaceInputs.__dataclass_fields__:
                if name != "page_format" and getattr(inputs, name) != getattr(merged[0], name):
                    raise RuntimeError(f"kvpool: rank {rank.rank} disagrees on {name}: {getattr(inputs, name)!r}")
        formats = sorted({part for r in ranks for part in r.inputs.page_format.split(",")})
        return replace(merged[0], page_format=",".join(formats))

    def _adopt(self, inputs: NamespaceInputs) -> None:
        self.inputs = inputs
        self.namespace = inputs.digest
        self._spaces = {"": self._space(self.namespace)}

    def _space(self, namespace: str) -> Space:
        shards: list[dict[str, int]] = [{} for _ in range(self._num_groups)]
        for rank in sorted(self._ranks):
            for group, shard, nbytes in self._ranks[rank].shards:
                shards[group][shard] = nbytes
        keyed = (tuple(ShardKeys(key_prefix(namespace, g, s), n) for s, n in names.items()) for g, names in enumerate(shards))
        return Space(namespace, tuple(keyed))
