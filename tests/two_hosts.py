"""Two hosts on one machine: this one, and a network namespace behind a link that can be cut. Needs root and iproute2."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from tests.stores.needs import lacking


class Link:
    """``far`` is the other host's address, ``prefix`` comes before a command that is to run there."""

    def __init__(self, number: int) -> None:
        self.name = f"kvpool-{number}"
        self._near_end, self._far_end = f"kvn{number}", f"kvf{number}"
        self.near, self.far = (f"10.231.{number % 251}.{host}" for host in (1, 2))
        self.prefix = ["nsenter", f"--net=/run/netns/{self.name}"]

    def make(self) -> None:
        _ip("netns", "add", self.name)
        _ip("link", "add", self._near_end, "type", "veth", "peer", "name", self._far_end, "netns", self.name)
        _ip("addr", "add", f"{self.near}/24", "dev", self._near_end)
        _ip("link", "set", self._near_end, "up")
        for arguments in (
            ["addr", "add", f"{self.far}/24", "dev", self._far_end],
            ["link", "set", self._far_end, "up"],
            ["link", "set", "lo", "up"],
        ):
            _ip("-n", self.name, *arguments)

    def cut(self) -> None:
        """No packet passes, and nobody is told."""
        _ip("-n", self.name, "link", "set", self._far_end, "down")

    def mend(self) -> None:
        _ip("-n", self.name, "link", "set", self._far_end, "up")

    def remove(self) -> None:
        for arguments in (["link", "del", self._near_end], ["netns", "del", self.name]):
            subprocess.run(["ip", *arguments], capture_output=True, check=False, timeout=60)


@contextmanager
def another_host() -> Iterator[Link]:
    """The link to it; removed at the end. What still runs there then has no network any more."""
    if os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("nsenter")):
        lacking("network namespaces need root, iproute2 and util-linux (make deps)")
    link = Link(os.getpid() % 100_000)
    try:
        link.make()
        yield link
    finally:
        link.remove()


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False, timeout=60)
    if done.returncode != 0:
        lacking(f"`ip {' '.join(arguments)}` failed: {done.stderr.strip()}")
