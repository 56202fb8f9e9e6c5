"""Fixtures for all tests. Engines and their logs: see `tests.engine.runner`."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TypeVar

import pytest
from hypothesis import HealthCheck, settings

from tests.engine.runner import Engine, EngineSpec

SHARED_MEMORY = Path("/dev/shm")

# Test machines are small and shared: no deadline, and data may be made slowly.
settings.register_profile("kvpool", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.load_profile("kvpool")

ENGINE_TESTS = Path(__file__).with_name("engine")


def pytest_configure(config: pytest.Config) -> None:
    """A run in the background (nohup, a script's &) ignores these, and so would every process that a test starts and signals."""
    for number, usual in ((signal.SIGHUP, signal.SIG_DFL), (signal.SIGINT, signal.default_int_handler)):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, usual)


def pytest_itemcollected(item: pytest.Item) -> None:
    if item.path.is_relative_to(ENGINE_TESTS):
        item.add_marker(pytest.mark.engine)


Report = TypeVar("Report", pytest.TestReport, pytest.CollectReport)


def _nothing_skipped(report: Report) -> Report:
    """Where the environment says CI, a test that is skipped has failed: nobody would see it."""
    if os.environ.get("CI") and report.skipped and not hasattr(report, "wasxfail"):
        report.outcome, report.longrepr = "failed", f"in CI nothing is skipped: {report.longrepr}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    return _nothing_skipped((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    return _nothing_skipped((yield))


@pytest.fixture(autouse=True)
def own_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that was set up in this process has hung kvpool's log below vLLM's, which caplog does not see."""
    monkeypatch.setattr(logging.getLogger("kvpool"), "parent", logging.getLogger())


@pytest.fixture
def pool_root(tmp_path: Path) -> Iterator[Path]:
    """An empty folder for pools, in shared memory where there is some; removed afterwards with whatever is in it."""
    shared = SHARED_MEMORY.is_dir() and os.access(SHARED_MEMORY, os.W_OK)
    folder = Path(tempfile.mkdtemp(prefix="kvpool-test-", dir=SHARED_MEMORY if shared else tmp_path))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def ssd(tmp_path: Path) -> Path:
    """An empty folder for a disk tier."""
    folder = tmp_path / "ssd"
    folder.mkdir()
    return folder


@pytest.fixture
def start_engine(tmp_path: Path) -> Iterator[Callable[[EngineSpec], Engine]]:
    """Start engines that are shut down after the test; a process that outlives its engine fails the test."""
    engines: list[Engine] = []

    def start(spec: EngineSpec) -> Engine:
        engines.append(Engine(spec, log_dir=tmp_path))
        return engines[-1]

    yield start
    leaked = [title for engine in engines for title in engine.close()]
    assert not leaked, f"processes that outlived their engine: {leaked}"
