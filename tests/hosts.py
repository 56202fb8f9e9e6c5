"""Several hosts on one machine: network namespaces on one switch, at which this host is too. Their cables can be pulled and slowed
down. Needs root, iproute2 and util-linux."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from tests.stores.needs import lacking

NEAR = 254
_made = 0


class Host:
    """``address``: of the host; ``prefix`` comes before a command that is to run there."""

    def __init__(self, network: Network, number: int) -> None:
        self.space, self.address = f"{network.name}-{number}", network.address(number)
        self.prefix = ["nsenter", f"--net=/run/netns/{self.space}"]
        self.end, self._port = f"{network.name}h{number}", f"{network.name}p{number}"

    def attach(self, switch: str) -> None:
        _run("ip", "netns", "add", self.space)
        _run("ip", "link", "add", self._port, "type", "veth", "peer", "name", self.end, "netns", self.space)
        _run("ip", "link", "set", self._port, "master", switch, "up")
        _run("ip", "-n", self.space, "addr", "add", f"{self.address}/24", "dev", self.end)
        for name in (self.end, "lo"):
            _run("ip", "-n", self.space, "link", "set", name, "up")

    def cut(self) -> None:
        """No packet passes, and nobody is told."""
        _run("bridge", "link", "set", "dev", self._port, "state", "0")

    def mend(self) -> None:
        _run("bridge", "link", "set", "dev", self._port, "state", "3")

    def slow_down(self, rate: str) -> None:
        """What the host sends: ``rate`` as tc writes it, "40mbit"."""
        _run(*self.prefix, "tc", "qdisc", "add", "dev", self.end, "root", "tbf", "rate", rate, "burst", "64kb", "latency", "100ms")

    def full_speed(self) -> None:
        _run(*self.prefix, "tc", "qdisc", "del", "dev", self.end, "root")

    def remove(self) -> None:
        for command in (["ip", "link", "del", self._port], ["ip", "netns", "del", self.space]):
            subprocess.run(command, capture_output=True, check=False, timeout=10)


class Network:
    """``near``: this host's own address on it."""

    def __init__(self, number: int) -> None:
        self.name, self._subnet = f"kv{number}", f"10.231.{number % 251}"
        self.near = self.address(NEAR)

    def address(self, number: int) -> str:
        return f"{self._subnet}.{number}"

    def make(self) -> None:
        _run("ip", "link", "add", self.name, "type", "bridge")
        _run("ip", "addr", "add", f"{self.near}/24", "dev", self.name)
        _run("ip", "link", "set", self.name, "up")

    def remove(self) -> None:
        subprocess.run(["ip", "link", "del", self.name], capture_output=True, check=False, timeout=10)


@contextmanager
def other_hosts(count: int) -> Iterator[list[Host]]:
    """So many, removed at the end. What still runs there then has no network any more."""
    global _made
    missing = [tool for tool in ("ip", "bridge", "tc", "nsenter") if not shutil.which(tool)]
    if os.geteuid() != 0 or missing:
        lacking(f"network namespaces need root, iproute2 and util-linux (make deps); missing: {missing or 'root'}")
    _made += 1
    network = Network(os.getpid() % 10_000 * 10 + _made % 10)
    hosts = [Host(network, number + 1) for number in range(count)]
    try:
        try:
            network.make()
            for host in hosts:
                host.attach(network.name)
        except OSError as error:
            lacking(str(error))
        yield hosts
    finally:
        for host in hosts:
            host.remove()
        network.remove()


def _run(*command: str) -> None:
    """OSError with what it says where it fails: a test in which a cable is not pulled tests nothing."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=10)
    if done.returncode != 0:
        raise OSError(f"`{' '.join(command)}` failed: {done.stderr.strip()}")
