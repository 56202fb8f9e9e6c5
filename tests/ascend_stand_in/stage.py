"""A place for tests of several processes: all of them in one namespace with the stand-in, and none left at its end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from tests.ascend_stand_in.build import build
from tests.ascend_stand_in.namespace import environment

ROOT = Path(__file__).parents[2]
READY_S = 60.0


class Stage:
    """Commands run in ``folder``; ``close`` ends every process of the namespace, whoever started it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        keeper = [sys.executable, "-m", "tests.ascend_stand_in", sys.executable, "-c", _KEEPER]
        self._keeper = subprocess.Popen(
            keeper, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert self._keeper.stdout is not None
        answer = self._keeper.stdout.readline().strip()
        if answer != "here":
            self._keeper.wait(READY_S)
            raise OSError(answer)
        self._namespace = os.readlink(f"/proc/{self._keeper.pid}/ns/mnt")
        assert self._namespace != os.readlink("/proc/self/ns/mnt")

    @property
    def prefix(self) -> list[str]:
        """What comes before a command that is to run here."""
        found = environment(build())
        variables = [f"{name}={found[name]}" for name in ("ASCEND_HOME_PATH", "LD_LIBRARY_PATH")]
        return ["nsenter", f"--mount=/proc/{self._keeper.pid}/ns/mnt", f"--wdns={ROOT}", "env", *variables]

    def start(
        self,
        command: Sequence[str],
        *,
        extra_env: dict[str, str] | None = None,
        log: str | None = None,
        outside: Sequence[str] = (),
    ) -> subprocess.Popen[str]:
        """A process that reads from its stdin and writes to a pipe, or to ``folder/log``. ``outside`` comes before all of it."""
        inside = [*outside, "nsenter", f"--mount=/proc/{self._keeper.pid}/ns/mnt", f"--wdns={self.folder}", *command]
        env = {**environment(build()), "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", **(extra_env or {})}
        out = subprocess.PIPE if log is None else (self.folder / log).open("a")
        return subprocess.Popen(inside, env=env, stdin=subprocess.PIPE, stdout=out, stderr=subprocess.STDOUT, text=True)

    def python(
        self,
        module: str,
        *arguments: str,
        timeout_s: float,
        extra_env: dict[str, str] | None = None,
        outside: Sequence[str] = (),
    ) -> str:
        """What ``python -m module`` prints; AssertionError where it fails or takes too long."""
        process = self.start([sys.executable, "-m", module, *arguments], extra_env=extra_env, outside=outside)
        try:
            output, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
            raise AssertionError(f"{module} took more than {timeout_s:g} s: {output[-2000:]}") from None
        assert process.returncode == 0, f"{module} ended with {process.returncode}: {output[-2000:]}"
        return output

    def processes(self) -> list[int]:
        """Every process in the namespace but its keeper."""
        found = []
        for entry in Path("/proc").iterdir():
            with suppress(OSError):
                if entry.name.isdigit() and os.readlink(entry / "ns" / "mnt") == self._namespace:
                    found.append(int(entry.name))
        return [pid for pid in found if pid != self._keeper.pid]

    def close(self) -> None:
        """Idempotent."""
        if self._keeper.poll() is not None:
            return
        end = time.monotonic() + 10
        while (left := self.processes()) and time.monotonic() < end:
            for pid in left:
                with suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)
        self._keeper.kill()
        self._keeper.wait()
        assert not left, f"processes that could not be ended: {left}"


_KEEPER = "import sys; print('here', flush=True); sys.stdin.read()"
