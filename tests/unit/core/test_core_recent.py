"""The negative cache: it forgets by age and by number, against a model of it."""

from __future__ import annotations

import threading

from hypothesis import given
from hypothesis import strategies as st

from kvpool.core.recent import RecentSet

Steps = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.lists(st.integers(0, 9), max_size=4)),
        st.tuples(st.just("discard"), st.lists(st.integers(0, 9), max_size=4)),
        st.tuples(st.just("wait"), st.sampled_from([0.5, 1.0, 2.5])),
        st.tuples(st.just("clear"), st.none()),
    ),
    max_size=30,
)


@given(Steps, st.integers(0, 6))
def test_it_holds_the_youngest_names_for_their_time(steps, capacity):
    now = [0.0]
    names = RecentSet(capacity, 3.0, lambda: now[0])
    order: dict[int, float] = {}
    for what, value in steps:
        if what == "wait":
            now[0] += value
        elif what == "add":
            names.add(value)
            for name in value:
                order.pop(name, None)
                order[name] = now[0] + 3.0
            while len(order) > capacity:
                del order[next(iter(order))]
        elif what == "discard":
            names.discard(value)
            for name in value:
                order.pop(name, None)
        else:
            names.clear()
            order.clear()
        for name in range(10):
            assert (name in names) == (order.get(name, 0.0) > now[0])
        order = {name: until for name, until in order.items() if until > now[0]}
        assert len(names) <= capacity


def test_bc_116_expired_names_leave_when_asked_for():
    now = [0.0]
    names = RecentSet(10, 1.0, lambda: now[0])
    names.add(["a", "b"])
    now[0] = 1.0
    assert "a" not in names
    assert len(names) == 1


def test_it_survives_many_threads():
    names = RecentSet(50, 60.0)
    errors = []

    def work(seed: int) -> None:
        try:
            for i in range(2000):
                names.add([(seed, i % 70)])
                _ = (seed, (i * 7) % 70) in names
                names.discard([(seed, (i * 3) % 70)])
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert len(names) <= 50
