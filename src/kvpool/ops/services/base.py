"""The contract of a service that kvpool starts for trial and test: processes of one host, in one folder, that stay."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Running:
    """One process: ``started`` is its start time in clock ticks, so that a reused pid is not taken for it."""

    name: str
    pid: int
    started: int
    log: str


@dataclass(frozen=True, slots=True)
class Started:
    """What ``start`` made. ``env``: variables an engine needs to use it, the client's configuration file among them."""

    backend: str
    folder: str
    processes: list[Running]
    env: dict[str, str]
    addresses: dict[str, str] = field(default_factory=dict)  # what listens where
    notes: list[str] = field(default_factory=list)  # what the user should know, one line each


class Service(ABC):
    """``start`` and ``stop`` are a pair. One folder holds one service: its state, its logs, its files."""

    backend: str

    @abstractmethod
    def start(self, folder: Path, deadline_s: float) -> Started:
        """Start, wait until it answers, write the client files. OSError with the reason in one line (and nothing left running)
        where it does not come up in time; ValueError where the folder holds a service that runs."""

    @abstractmethod
    def stop(self, folder: Path, deadline_s: float) -> list[str]:
        """Stop what runs, politely and then not; the names of what had to be killed. Does nothing where nothing runs.
        ValueError where the folder holds another store's service."""

    @abstractmethod
    def status(self, folder: Path) -> dict[str, str]:
        """Per process: ``ready``, ``starting`` (runs, does not answer) or ``dead``; empty where none was started. ValueError as for
        ``stop``."""
