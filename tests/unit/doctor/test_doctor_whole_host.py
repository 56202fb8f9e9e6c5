"""A whole A3 host made of files and tools: nothing is wrong; one thing is taken away, and exactly that is found."""

from __future__ import annotations

import json
import socket

import pytest

from kvpool.ops.doctor import Asked, Host, Level, examine
from kvpool.ops.doctor.host import Ran

PACKAGES = {
    "vllm": "0.32.0",
    "vllm-ascend": "0.32.0",
    "mooncake-transfer-engine-npu": "0.3.13",
}
ENV = {
    "ASCEND_HOME_PATH": "/usr/local/Ascend/cann",
    "LD_LIBRARY_PATH": "/site-packages/mooncake",
    "ACL_OP_INIT_MODE": "1",
    "ASCEND_ENABLE_USE_FABRIC_MEM": "1",
    "ASCEND_RT_VISIBLE_DEVICES": "0,1",
}
FILES = {
    "dev/davinci0": "",
    "dev/davinci1": "",
    "dev/davinci_manager": "",
    "dev/devmm_svm": "",
    "dev/hisi_hdc": "",
    "etc/hccn.conf": "address_0=10.1.0.1\naddress_1=10.1.0.2\n",
    "proc/meminfo": "MemTotal: 99999999 kB\nMemFree: 90000000 kB\nMemAvailable: 95000000 kB\nCached: 1000000 kB\n",
    "proc/buddyinfo": "Node 0, zone   Normal 0 0 0 0 0 0 0 0 0 0 40000\n",
    "proc/self/cgroup": "0::/user.slice\n",
    "usr/local/Ascend/cann/ascend_toolkit_install.info": "version=9.1.0\n",
    "usr/local/Ascend/driver/version.info": "Version=26.0.0\n",
    "usr/local/dcmi/libdcmi.so": "",
}
NOT_OF_THE_FAKE_HOST = {"glibc", "locked memory"}  # this process's own
NOT_YET = ("configuration", "device")  # NPUs are not run yet


def look(tmp_path, port, without="", env=None, packages=None, tools=True):
    root = tmp_path / "root"
    for name, text in FILES.items():
        if name != without:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)
    config = tmp_path / "mooncake.json"
    config.write_text(json.dumps({"master_server_address": f"127.0.0.1:{port}", "global_segment_size": "20GB"}))
    seen = ENV | {"MOONCAKE_CONFIG_PATH": str(config)} | (env or {})
    host = Host(seen, root, (lambda command: Ran(0, "")) if tools else (lambda command: None), (packages or PACKAGES).get)
    master = f"mooncake_master --port {port} --default_kv_lease_ttl 40000"
    _, findings = examine(Asked(series="a3", ranks=2, commands=(master,), lingqu="1.5", measure=False), host)
    bad = [finding for finding in findings if finding.level is Level.FAILURE and finding.check not in NOT_OF_THE_FAKE_HOST]
    return {(finding.area, finding.check) for finding in bad} - {NOT_YET}


@pytest.fixture
def port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def test_nothing_is_wrong(tmp_path, port):
    assert look(tmp_path, port) == set()


@pytest.mark.parametrize(
    ("changes", "check"),
    [
        ({"without": "dev/hisi_hdc"}, ("files", "npu devices")),
        ({"without": "etc/hccn.conf"}, ("files", "hccn.conf")),
        ({"without": "usr/local/dcmi/libdcmi.so"}, ("files", "driver folder")),
        ({"without": "usr/local/Ascend/cann/ascend_toolkit_install.info"}, ("versions", "cann")),
        ({"env": {"ASCEND_RT_VISIBLE_DEVICES": "0,5"}}, ("environment", "visible devices")),
        ({"env": {"ASCEND_TRANSFER_TIMEOUT": "41000"}}, ("lease", "configured")),
        ({"packages": PACKAGES | {"mooncake-transfer-engine-npu": "0.3.9"}}, ("versions", "store")),
        ({"tools": False}, ("npu tools", "npu-smi")),
    ],
)
def test_what_is_taken_away_is_found(tmp_path, port, changes, check):
    found = look(tmp_path, port, **changes)
    assert check in found
    assert found - {check, ("configuration", "options"), ("versions", "hdk")} == set()


def test_a_master_that_is_gone(tmp_path):
    assert look(tmp_path, 1) == {("ports", "service")}
