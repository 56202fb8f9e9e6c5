"""The protocol of readers.py as a model: every interleaving of one reader with the writers, step by step.

LMDB in the model: transaction T, when it runs, spoils the pages of all snapshots before T - 2; its commit writes the roots of its
meta page first, then the number. The reader takes the roots that it finds in the page whose number it compared and then loaded."""

from collections.abc import Iterator
from typing import NamedTuple

import pytest

LAST = 6


class State(NamedTuple):
    numbers: tuple[int, int] = (2, 1)  # of the two meta pages
    roots: tuple[int, int] = (2, 1)
    running: int = 2  # the newest transaction that ever ran
    writer: str = "look"
    slot: int = 0
    reader: str = "announce"
    known: int = 2
    page: int = 0
    found: int = 0  # number
    root: int = 0
    again: int = -1  # the number at the begin before this one


class Wrong(Exception):
    pass


def written(state: State, guard: bool) -> Iterator[State]:
    """The writer's next step. Any process may take over at ``look``."""
    number = max(state.numbers) + 1
    side = number & 1
    if state.writer == "look":
        if number <= LAST and not (guard and 0 < state.slot < number):
            yield state._replace(writer="roots", running=number)
    elif state.writer == "roots":
        yield state._replace(writer="look")  # it dies, or has nothing to commit
        yield state._replace(writer="number", roots=tuple(number if i == side else r for i, r in enumerate(state.roots)))
    else:
        yield state._replace(writer="look", numbers=tuple(number if i == side else n for i, n in enumerate(state.numbers)))


def read(state: State, early: int, late: int) -> Iterator[State]:
    step = state.reader
    if step == "announce":
        yield state._replace(reader="pick", slot=state.known + early)
    elif step == "pick":
        yield state._replace(reader="load", page=int(state.numbers[0] < state.numbers[1]))
    elif step == "load":
        yield state._replace(reader="copy", found=state.numbers[state.page])
    elif step == "copy":
        yield state._replace(reader="check", root=state.roots[state.page])
    elif step == "check":
        if state.found in (state.known, state.again):
            yield state._replace(reader="raise", again=-1)
        else:
            yield state._replace(reader="pick", again=state.found)
    elif step == "raise":
        yield state._replace(reader="use", known=state.found, slot=state.found + late)
    else:
        if state.root != state.found:
            raise Wrong("roots of another transaction")
        if state.found < state.running - 2:
            raise Wrong("its pages are used again")
        yield state
        yield state._replace(reader="announce", slot=0)


def explore(*, guard: bool = True, early: int = 1, late: int = 2, known: int = 2) -> int:
    """How many states can be reached. A read of snapshot n allows n + early while it begins, n + late from then on."""
    first = State(known=known)
    seen, todo = {first}, [first]
    while todo:
        state = todo.pop()
        for after in (*written(state, guard), *read(state, early, late)):
            if after not in seen:
                seen.add(after)
                todo.append(after)
    return len(seen)


@pytest.mark.parametrize("known", [0, 1, 2])
def test_no_interleaving_reads_anything_wrong(known):
    assert explore(known=known) > 200


@pytest.mark.parametrize("change", [{"guard": False}, {"early": 2}, {"late": 3}])
def test_anything_less_does(change):
    with pytest.raises(Wrong):
        explore(**change)
