"""Every check of the contract: the embedded store without and with a disk tier, and a faulty store without faults."""

from pathlib import Path

import pytest

from kvpool.stores import Store, build_store
from kvpool.stores.conformance import CHECKS, MIN_CAPACITY, run_check
from kvpool.stores.disk_settings import DiskSettings


@pytest.mark.parametrize("kind", ["local", "disk", "faulty"])
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_contract(check, kind, pool_root: Path, tmp_path: Path):
    eager = {"dram_high": 2, "dram_low": 1}  # copies nearly everything at once
    disk = DiskSettings(str(tmp_path), 4 * MIN_CAPACITY, **eager) if kind == "disk" else None

    def make_store() -> Store:
        plan = pool_root / "plan.json" if kind == "faulty" else None
        return build_store("local", root=pool_root, name="conformance", dram_bytes=MIN_CAPACITY, disk=disk, fault_plan_path=plan)

    outcome = run_check(check, make_store)
    assert outcome.passed, outcome.text
    left = build_store("local", root=pool_root, name="conformance")
    left.open()
    assert (len(left.stats().tiers) == 2) == (kind == "disk")
    assert left.verify() == []
    left.close()
