"""Measuring: a real local pool, in a process that may hang or crash, and stores that lose or change bytes."""

from __future__ import annotations

import json
import os
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import pytest
from tests.unit.doctor import good

from kvpool.ops.doctor import measured, measuring
from kvpool.ops.doctor.host import Ran
from kvpool.ops.doctor.measuring import MARK, Measured, measure, read_answer
from kvpool.options.ascend_store import AscendStoreOptions
from kvpool.stores import build_store

SHARED = "/dev/shm"


def leftovers(folder):
    return {name for name in os.listdir(folder) if name.startswith("kvpool-doctor-")}


def at(root):
    return replace(good.LOCAL, options=AscendStoreOptions.model_validate({"local_pool_root": str(root)}))


@pytest.mark.skipif(not os.access(SHARED, os.W_OK), reason="this system has no /dev/shm")
def test_a_local_pool_is_measured_and_removed(monkeypatch):
    made, mkdtemp = [], tempfile.mkdtemp
    monkeypatch.setattr(measuring.tempfile, "mkdtemp", lambda **where: made.append(Path(mkdtemp(**where))) or str(made[-1]))
    found = measure(good.LOCAL)
    assert found.error == ""
    assert found.put_gbps > 0
    assert found.get_gbps > 0
    assert found.same
    assert found.lease_s is None
    assert [folder.parent for folder in made] == [Path(SHARED)]
    assert not made[0].exists()


def test_a_pool_that_cannot_be_made_is_an_answer(tmp_path, monkeypatch):
    def refuse(**_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(measuring.tempfile, "mkdtemp", refuse)
    assert measure(at(tmp_path)).error == f"no pool can be made in {tmp_path}: No space left on device"


def test_a_process_that_hangs_ends_at_its_deadline(tmp_path, monkeypatch):
    monkeypatch.setattr(measuring, "LOCAL_S", 0.05)
    began = time.monotonic()
    assert measure(at(tmp_path)).error == "no answer within 0.05 s"
    assert time.monotonic() - began < 30
    assert leftovers(tmp_path) == set()


def test_a_store_that_does_not_open_is_an_answer(tmp_path):
    need = replace(good.CPU_MOONCAKE, conf_variable="MOONCAKE_CONFIG_PATH", conf_path=str(tmp_path / "none.json"))
    assert "MOONCAKE_CONFIG_PATH" in measure(need).error
    assert "cannot be read" in measure(need).error


def test_secrets_of_the_environment_are_not_in_the_command(tmp_path, monkeypatch):
    commands = []
    monkeypatch.setattr(measuring, "run_tool", lambda command, seconds: commands.append(command))
    measure(replace(at(tmp_path), env={"KVPOOL_SECRET": "hidden"}))
    assert commands
    assert "hidden" not in " ".join(commands[0])


@pytest.mark.parametrize(
    ("ran", "error"),
    [
        (None, "this Python cannot start itself"),
        (Ran(None, "half a line"), "no answer within 3 s"),
        (Ran(-11, "x\nSegmentation fault\n"), "the measuring process ended with -11: Segmentation fault"),
        (Ran(1, ""), "the measuring process ended with 1: no output"),
        (Ran(1, MARK + "{"), f"the measuring process ended with 1: {MARK}{{"),
        (Ran(1, MARK + '{"strange": 1}'), f"the measuring process ended with 1: {MARK}" + '{"strange": 1}'),
    ],
)
def test_what_a_process_leaves(ran, error):
    assert read_answer(ran, 3).error == error


def test_an_answer_counts_although_the_process_hung_or_crashed_after_it():
    line = MARK + json.dumps({"put_gbps": 1.0, "get_gbps": 2.0, "same": True, "lease_s": None, "error": ""})
    for code in (None, -6, 0):
        assert read_answer(Ran(code, f"noise\n{line}\nterminate called\n"), 3) == Measured(1.0, 2.0)


def faulty(tmp_path, **faults):
    (tmp_path / "plan.json").write_text(json.dumps(faults))
    store = build_store("local", root=tmp_path, name="m", dram_bytes=measured.POOL, fault_plan_path=tmp_path / "plan.json")
    store.open()
    return store


def small(monkeypatch):
    monkeypatch.setattr(measured, "COUNT", 4)
    monkeypatch.setattr(measured, "OBJECT", 4096)


def test_what_was_written_is_removed_again(tmp_path, monkeypatch):
    small(monkeypatch)
    store = build_store("local", root=tmp_path, name="m", dram_bytes=measured.POOL)
    store.open()
    found = measured.measure_store(store)
    assert found.error == ""
    assert found.same
    assert store.list() == []
    store.close()
    assert Path(tmp_path / "m").exists()


@pytest.mark.parametrize(
    ("calls", "error", "same"),
    [
        ({"get": {"corrupt": True, "indexes": [1]}}, "", False),
        ({"put": {"lose": True, "indexes": [1]}}, "get: 1 of 4 objects failed: missing", True),
        ({"put": {"full": True}}, "put: 4 of 4 objects failed: no_space injected", True),
    ],
)
def test_a_store_that_loses_or_changes_bytes_is_found_out(tmp_path, monkeypatch, calls, error, same):
    small(monkeypatch)
    store = faulty(tmp_path, calls=calls)
    found = measured.measure_store(store)
    assert (found.error, found.same) == (error, same)
    assert store.list() == []
    store.close()


def test_a_store_that_hangs_is_left(tmp_path, monkeypatch):
    small(monkeypatch)
    monkeypatch.setattr(measured, "CALL_S", 1.0)
    monkeypatch.setattr(measured, "GRACE_S", 0.2)
    store = faulty(tmp_path, calls={"get": {"late_s": 4.0}})
    found = measured.measure_store(store)
    assert found.error == "a get was not done after 1.2 s"
    store.close()
