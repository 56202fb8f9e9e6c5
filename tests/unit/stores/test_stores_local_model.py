"""LocalStore against a dictionary: what is there has the right bytes, what is leased is there, the books are always right."""

import shutil
import tempfile
from pathlib import Path

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tests.unit.stores.helpers import GRANULE, get, has, key, opened, put

from kvpool.stores.base import Hit, Status

KEYS = st.lists(st.integers(0, 24), min_size=1, max_size=6, unique=True)
SIZES = st.sampled_from([100, GRANULE, 2 * GRANULE, 5 * GRANULE])


class Model(RuleBasedStateMachine):
    """A pool so small that most puts evict."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="kvpool-test-", dir="/dev/shm"))
        self.stores = [opened(self.root, 32 * GRANULE) for _ in range(2)]
        self.turn = 0
        self.contents: dict[bytes, tuple[int, int]] = {}  # key -> fill, nbytes; perhaps evicted since
        self.leases = []
        self.slots = []

    def teardown(self) -> None:
        for store in self.stores:
            store.close()
        shutil.rmtree(self.root)

    def store(self):
        self.turn += 1
        return self.stores[self.turn % 2]

    def leased(self) -> set[bytes]:
        return {name for _, lease, names in self.leases for name in names}

    @rule(numbers=KEYS, nbytes=SIZES)
    def put(self, numbers, nbytes):
        fill = self.turn % 200 + 1
        names = [key(number // 2, number % 2) for number in numbers]
        store = self.store()
        before = dict(zip(names, has(store, names), strict=True))
        for name, status in zip(names, put(store, names, nbytes, fill), strict=True):
            assert status in (Status.OK, Status.EXISTS, Status.NO_SPACE), status
            assert (status is Status.EXISTS) == before[name]
            if status is Status.OK:
                self.contents[name] = (fill, nbytes)
            assert has(store, [name]) == [status is not Status.NO_SPACE]

    @rule(numbers=KEYS)
    def get(self, numbers):
        for number in numbers:
            name = key(number // 2, number % 2)
            if name not in self.contents:
                assert has(self.store(), [name]) == [False]
                continue
            fill, nbytes = self.contents[name]
            (got,) = get(self.store(), [name], nbytes)
            assert got == fill or (got is None and name not in self.leased())

    @rule(numbers=KEYS)
    def lease(self, numbers):
        names = [key(number // 2, number % 2) for number in numbers]
        store = self.store()
        there = has(store, names)
        lease = store.lease(names, 600.0)
        assert [isinstance(answer, Hit) for answer in lease.answers] == there
        self.leases.append((store, lease, [name for name, hit in zip(names, there, strict=True) if hit]))

    @precondition(lambda self: self.leases)
    @rule()
    def release(self):
        store, lease, _ = self.leases.pop(0)
        store.release(lease)

    @rule(numbers=KEYS)
    def remove(self, numbers):
        names = [key(number // 2, number % 2) for number in numbers]
        store = self.store()
        there, leased = has(store, names), self.leased()
        for name, hit, result in zip(names, there, store.remove(names), strict=True):
            wanted = Status.MISSING if not hit else Status.BUSY if name in leased else Status.OK
            assert result.status is wanted
            self.contents.pop(name, None)
        self.leases = [(owner, lease, [name for name in held if name not in names]) for owner, lease, held in self.leases]

    @rule(count=st.integers(1, 3), nbytes=SIZES)
    def reserve(self, count, nbytes):
        store = self.store()
        self.slots.extend((store, slot) for slot in store.reserve(count, nbytes, 5.0))

    @precondition(lambda self: self.slots)
    @rule(number=st.integers(0, 24), publish=st.booleans())
    def end_reservation(self, number, publish):
        import ctypes

        store, slot = self.slots.pop()
        name = key(number // 2, number % 2)
        if not publish:
            store.discard([slot])
            store.remove([b"wait for the discard"])
            return
        ctypes.memset(slot.address, 250, slot.nbytes)
        there = has(store, [name]) == [True]
        (result,) = store.publish([(slot, name)], 5.0)
        assert result.status is (Status.EXISTS if there else Status.OK)
        if not there:
            self.contents[name] = (250, slot.nbytes)

    @precondition(lambda self: not self.leases and not self.slots)
    @rule()
    def reopen(self):
        store = self.stores[self.turn % 2]
        store.close()
        store.open()

    @invariant()
    def books_are_right(self):
        store = self.stores[0]
        assert store.verify() == []
        stats = store.stats()
        assert 0 <= stats.used_bytes <= stats.capacity_bytes
        assert stats.writing == len(self.slots)
        assert stats.leases == len(self.leased() & set(store.list())) or self.leases
        assert set(store.list()) <= set(self.contents)
        assert self.leased() <= set(store.list())


TestModel = Model.TestCase
TestModel.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)


def test_without_want_of_room_the_store_is_a_dictionary(pool_root):
    rng = np.random.default_rng(1)
    store, model = opened(pool_root, 8 << 20), {}
    for _ in range(300):
        names = [key(number) for number in rng.integers(0, 60, 3)]
        move = rng.integers(0, 4)
        if move < 2:
            fill = int(rng.integers(1, 255))
            put(store, names, fill=fill)
            for name in names:
                model.setdefault(name, fill)
        elif move == 2:
            store.remove(names[:1])
            model.pop(names[0], None)
        assert get(store, names) == [model.get(name) for name in names]
    assert sorted(store.list()) == sorted(model)
    store.close()
