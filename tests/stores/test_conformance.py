"""Every check of the contract, against the embedded store and against a faulty store without faults."""

from pathlib import Path

import pytest

from kvpool.stores import Store, build_store
from kvpool.stores.conformance import CHECKS, MIN_CAPACITY, run_check


@pytest.mark.parametrize("wrapped", [False, True], ids=["local", "faulty"])
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_contract(check, wrapped, pool_root: Path):
    def make_store() -> Store:
        plan = pool_root / "plan.json" if wrapped else None
        return build_store("local", root=pool_root, name="conformance", dram_bytes=MIN_CAPACITY, fault_plan_path=plan)

    outcome = run_check(check, make_store)
    assert outcome.passed, outcome.text
    left = build_store("local", root=pool_root, name="conformance")
    left.open()
    assert left.verify() == []
    left.close()
