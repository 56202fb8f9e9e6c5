"""Ctrl-C, SIGTERM and SIGHUP as one exception, once: what is being started or stopped is never cut in two by a signal."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Told(BaseException):
    """The user, or the system, has told us to end. ``number``: by which signal."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number

    @property
    def exit_code(self) -> int:
        """As a shell has it."""
        return 128 + self.number


class Signals:
    """Within its block, in the main thread, the first signal raises ``Told``; later ones do nothing."""

    def __init__(self) -> None:
        self._before: dict[int, object] = {}
        self._told = 0
        self._raised = False
        self._held = 0

    def __enter__(self) -> Signals:
        for number in NUMBERS:
            if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                continue  # under nohup: it shall go on without its terminal
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    @contextmanager
    def held(self) -> Iterator[None]:
        """A signal within this block is raised at its end."""
        self._held += 1
        try:
            yield
        finally:
            self._held -= 1
        self._raise()

    def ignore(self) -> None:
        """From here on none is raised: what remains to do has deadlines of its own."""
        self._raised = True

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._told = self._told or number
        self._raise()

    def _raise(self) -> None:
        if self._told and not self._held and not self._raised:
            self._raised = True
            raise Told(self._told)
