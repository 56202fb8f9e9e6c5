"""The cases of the rules about versions; see rule_cases.py."""

from __future__ import annotations

from dataclasses import replace

from tests.unit.doctor import good
from tests.unit.doctor.case import FAILURE, UNKNOWN, WARNING, Case, case, env

from kvpool.ops.doctor.rules import versions
from kvpool.options.prefill_decode import PullOptions

SIDES = {"prefill": {"tp_size": 1, "dp_size": 1}, "decode": {"tp_size": 1, "dp_size": 1}}
PULL = PullOptions.model_validate(SIDES)
SSD_CONF = good.memcache(protocol="device_sdma", dram_size="10GB", storage_enabled="true")


def of_versions() -> list[Case]:
    def of(check, level, found, fix, need, **changes):
        return case(check, level, found, fix, versions.judge_versions, (good.VERSIONS, need), **changes)

    non_cuda = (("mooncake-transfer-engine-non-cuda", "0.3.13"),)
    old = (("mooncake-transfer-engine-npu", "0.3.10"),)
    both = (*good.VERSIONS.mooncake, *non_cuda)
    separated = env(good.A3, ASCEND_GLOBAL_RESOURCE_CONFIG='{"store.comm_resource_config.protocol_desc":["roce:device"]}')
    v = versions
    return [
        of(v.PYTHON, FAILURE, "3.10.1", "environment", good.LOCAL, python="3.10.1"),
        of(v.PYTHON, FAILURE, "3.14.0", "environment", good.LOCAL, python="3.14.0"),
        of(v.VLLM, FAILURE, "not installed", "pip install vllm", good.LOCAL, vllm=None),
        of(v.VLLM, FAILURE, "0.31.2", "pip install vllm==0.32.0", good.LOCAL, vllm="0.31.2"),
        of(v.VLLM, WARNING, "0.33.0", "tested on 0.32", good.LOCAL, vllm="0.33.0"),
        of(v.VLLM, UNKNOWN, "dev", "released version", good.LOCAL, vllm="dev"),
        of(v.VLLM_ASCEND, FAILURE, "not installed", "pip install vllm-ascend", good.A2, vllm_ascend=None),
        of(v.VLLM_ASCEND, WARNING, "0.18.0", "release notes", good.A2, vllm_ascend="0.18.0"),
        of(v.GLIBC, FAILURE, "2.34", "newer system", good.A2, glibc="2.34"),
        of(v.GLIBC, UNKNOWN, "not shown", "newer system", good.A2, glibc=None),
        of(v.STORE, FAILURE, "not installed", "pip install mooncake-transfer-engine-npu", good.A2, mooncake=()),
        of(v.STORE, FAILURE, "non-cuda", "pip uninstall mooncake-transfer-engine-non-cuda", good.A2, mooncake=non_cuda),
        of(v.STORE, FAILURE, "both installed", "no other", good.A2, mooncake=both),
        of(v.STORE, FAILURE, "0.3.10", "--upgrade mooncake-transfer-engine-npu", good.A2, mooncake=old),
        of(v.STORE, FAILURE, "not installed", "pip install memcache-hybrid memfabric-hybrid", good.A3_MEMCACHE, memcache=None),
        of(v.STORE, FAILURE, "not installed", "pip install openyuanrong-datasystem", good.A3_YUANRONG, yuanrong=None),
        of(v.STORE, FAILURE, "1.1.9", "--upgrade memcache-hybrid", good.A3_MEMCACHE, memcache="1.1.9", conf=SSD_CONF),
        of(v.MEMFABRIC, FAILURE, "not found", "memfabric-hybrid", good.A5_MEMCACHE, memfabric=None),
        of(v.MEMFABRIC, FAILURE, "1.1.0", "--upgrade memfabric-hybrid, before", good.A3_LAYERWISE, memfabric="1.1.0"),
        of(v.MEMFABRIC, FAILURE, "1.1.0", "--upgrade memfabric-hybrid", good.A3_REMOTE_D2H, memfabric="1.1.0"),
        of(v.MEMFABRIC, FAILURE, "not found", "memfabric-hybrid", good.A3_REMOTE_D2H, memfabric=None),
        of(v.CANN, FAILURE, "8.3.RC2", "install CANN 8.5.0", good.A2, cann="8.3.RC2"),
        of(v.CANN, FAILURE, "9.0.RC1", "install CANN 9.0.0", good.A3, cann="9.0.RC1"),
        of(v.CANN, FAILURE, "9.0.0", "install CANN 9.1.0", good.A5, cann="9.0.0"),
        of(v.CANN, FAILURE, "9.0.0", "install CANN 9.1.0", replace(good.A3, env=separated), cann="9.0.0"),
        of(v.CANN, FAILURE, "not found", "set_env.sh", good.A2, cann=None),
        of(v.HDK, WARNING, "25.3.0", "25.5 is recommended", good.A2, npu_driver="25.3.0"),
        of(v.HDK, FAILURE, "25.5.0", "Mooncake to 0.3.11", good.A3, npu_driver="25.5.0", mooncake=old),
        of(v.HDK, FAILURE, "25.3.0", "update driver", good.A3, npu_driver="25.3.0"),
        of(v.HDK, FAILURE, "25.5.1", "update driver", good.A3_MEMCACHE, npu_driver="25.5.1"),
        of(v.HDK, FAILURE, "25.5.1", "update driver", replace(good.A3_MEMCACHE, pull=PULL), npu_driver="25.5.1"),
        of(v.HDK, FAILURE, "25.3.0", "update driver", replace(good.A3_YUANRONG, pull=PULL), npu_driver="25.3.0"),
        of(v.HDK, FAILURE, "25.5.0", "update driver", good.A5_MEMCACHE, npu_driver="25.5.0"),
        of(v.HDK, FAILURE, "25.5.0", "update driver", good.A5, npu_driver="25.5.0"),
        of(v.HDK, FAILURE, "26.0.0 with Mooncake 0.3.10", "Mooncake to 0.3.11", good.A5, mooncake=old),
        of(v.HDK, UNKNOWN, "not shown", "version.info", good.A5, npu_driver=None),
        of(v.DRIVER, FAILURE, "25.5.0", "NPU driver", good.A3_LAYERWISE, npu_driver="25.5.0"),
        of(v.DRIVER, FAILURE, "25.5.0", "NPU driver", good.A3_REMOTE_D2H, npu_driver="25.5.0"),
        of(v.DRIVER, UNKNOWN, "not shown", "version.info", good.A3_REMOTE_D2H, npu_driver=None),
        of(v.DRIVER, FAILURE, "not found", "--gpus all", good.CUDA, nvidia_driver=None),
        of(v.LINGQU, FAILURE, "1.4", "--lingqu", good.A3, lingqu="1.4"),
        of(v.LINGQU, UNKNOWN, "not shown", "--lingqu", good.A3, lingqu=None),
    ]
