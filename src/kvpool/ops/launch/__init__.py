"""Deployments: ``launched(options)`` is one on this host; ``production`` has the files for hosts of a series."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from kvpool.ops.launch.abandoned import end_abandoned
from kvpool.ops.launch.options import LaunchOptions
from kvpool.ops.launch.place import own_place
from kvpool.ops.launch.plan import Place, Plan, make_plan, plain_plan
from kvpool.ops.launch.run import Launch
from kvpool.ops.launch.signals import Signals, Told

MakePlan = Callable[[LaunchOptions, Place], Plan]


@contextmanager
def launched(
    options: LaunchOptions,
    say: Callable[[str], None],
    deadline_s: float,
    logs: Path | None = None,
    plan: MakePlan = make_plan,
) -> Iterator[tuple[Plan, Launch]]:
    """A deployment that answers; at the end of the block nothing of it is left. ``options`` have been checked, ``logs`` is there.

    What a killed launch has left is ended first. OSError or ValueError where it does not come up within ``deadline_s`` seconds,
    ``Told`` where a signal says to end."""
    with ExitStack() as stack:
        signals = stack.enter_context(Signals())
        with signals.held():
            end_abandoned(say)
            place = stack.enter_context(own_place(options))
        made = plan(options, place)
        launch = stack.enter_context(Launch(made, place, signals, say, logs))
        launch.start(deadline_s)
        yield made, launch


__all__ = ["Launch", "LaunchOptions", "Place", "Plan", "Told", "launched", "make_plan", "plain_plan"]
