"""What is checked, and said, when a connector starts: the same rules as `kvpool config check`."""

from __future__ import annotations

import logging
import os
import re

import pytest

from kvpool.options import OptionError
from tests.contract.content import expected_output
from tests.contract.harness import Harness
from tests.contract.ranks import unwrap
from tests.contract.spec import Spec

PROMPT = list(range(100, 200))


@pytest.fixture
def told(monkeypatch) -> list[str]:
    """The warnings at start."""
    lines: list[str] = []
    monkeypatch.setattr("kvpool.engine.setup.logger.warning", lambda text, *words: lines.append(text % words))
    return lines


@pytest.mark.parametrize(("algorithm", "seed", "warned"), [("xxhash", None, True), ("xxhash", "0", False), ("sha256", None, False)])
def test_bc_009_random_hashes_without_a_seed_are_told_at_start(start, told, monkeypatch, algorithm, seed, warned):
    if seed is None:
        monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    else:
        monkeypatch.setenv("PYTHONHASHSEED", seed)
    start(hash_algorithm=algorithm)
    assert sum("PYTHONHASHSEED is not set" in line for line in told) == warned


def test_a_partition_that_does_not_fit_the_model_is_refused_at_start():
    options = {"consumer_is_to_put": True, "prefill_pp_size": 2, "prefill_pp_layer_partition": "1,2"}
    with pytest.raises(OptionError, match=r"prefill_pp_layer_partition=\"1,2\": adds up to 3 layers, but the model has 2"):
        Harness(Spec(role="kv_consumer", options=options))


@pytest.mark.parametrize("rival", ["first", "last"])
def test_bc_006_a_policy_on_a_child_is_one_warning_at_start(start, told, rival):
    """The parent's policy counts: what is configured for the child changes nothing."""
    engine = start(rival=rival, policy="fail", child={"kv_load_failure_policy": "recompute"})
    (line,) = [line for line in told if "has no effect there" in line]
    assert line.startswith(f"kvpool: connectors[{int(rival == 'first')}]: kv_load_failure_policy")
    assert any("kv_load_failure_policy is 'fail'" in line for line in told)
    engine.ask("a", PROMPT)
    engine.forget_local()
    engine.store.fail_keys("get", lambda key: True)
    engine.add("b", PROMPT, 3)
    engine.run()
    assert engine.answers["b"].reason == "error"
    engine.store.rules.clear()
    engine.assert_clean()


def test_a_child_without_a_policy_is_not_warned_about(start, told):
    start(rival="first", policy="recompute")
    assert not [line for line in told if "kv_load_failure_policy" in line]


def test_two_of_us_in_one_multiconnector_are_refused():
    with pytest.raises(OptionError, match="AscendStoreConnector may appear once"):
        Harness(Spec(rival="twin"))


def test_the_line_that_says_what_is_ready(start, monkeypatch):
    lines: list[str] = []
    monkeypatch.setattr("kvpool.engine.worker_side.logger.info", lambda text, *words: lines.append(text % words))
    start(tp=2, options={"qos_priority": 3, "local_pool_name": "p"})
    ready = [line for line in lines if "store ready" in line]
    assert len(ready) == 2, "one for each rank"
    for rank, line in enumerate(ready):
        for part in (
            "backend=local",
            f"address=/dev/shm/kvpool-{os.geteuid()}/p,",
            "tenant=default",
            "qos=3",
            "capacity=",
            f"rank {rank} holds group 0",
        ):
            assert part in line


def test_store_capacity_and_policy_are_told_at_start_and_the_namespace_at_the_first_request(start, monkeypatch):
    told: list[str] = []
    keep = lambda text, *words: told.append(text % words) if re.search("ranks have met|is of", text) else None  # noqa: E731
    monkeypatch.setattr("kvpool.engine.opening.logger.info", keep)
    engine = start(tp=2)
    engine.until(lambda: told)
    (line,) = told
    for part in (
        "backend local: ",
        f"address /dev/shm/kvpool-{os.geteuid()}/",
        "tenant default",
        f"capacity {1 << 30} bytes",
        "policy fail",
        "synchronous loads",
        "the namespace is made at the first request",
    ):
        assert part in line
    engine.ask("a", PROMPT)
    engine.until(lambda: len(told) > 1)
    engine.ask("b", PROMPT)
    engine.settle()
    (_, line) = told
    assert line.startswith(f"kvpool: namespace {engine.pool._agreement.namespace} is of {{")


@pytest.mark.parametrize("role", ["kv_both", "kv_producer", "kv_consumer"])
@pytest.mark.parametrize("rival", [None, "first", "last"])
def test_no_role_requires_that_kv_is_delivered(start, role, rival):
    """A dropped save is a later miss. Were delivery required, vLLM would drop the output of preempted requests."""
    engine = start(role=role, rival=rival)
    assert engine.scheduler.requires_kv_delivery is False
    for connector in (engine.scheduler.connector, *(rank.connector for rank in engine.ranks)):
        assert connector.requires_kv_delivery is False
        assert unwrap(connector).requires_kv_delivery is False


@pytest.mark.parametrize("load_async", [False, True])
def test_bc_108_threads_that_cannot_start_hold_nobody_up(start, monkeypatch, caplog, load_async):
    """There is no port to wait for; a thread that cannot bind its device fails its jobs, and requests are computed."""
    caplog.set_level(logging.CRITICAL)
    real = start()
    real.ask("a", PROMPT)
    real.settle()

    def refuse(self) -> None:
        raise OSError("no such device")

    monkeypatch.setattr("kvpool.devices.cpu.CpuDevice.bind_thread", refuse)
    engine = start(real.store, policy="recompute" if load_async else "fail", load_async=load_async)
    engine.shares_store = True
    engine.add("b", PROMPT, 3)
    engine.run(["b"], seconds=10)
    if load_async:
        assert engine.answers["b"].tokens == expected_output(PROMPT, 3)
    else:
        assert engine.answers["b"].reason == "error"
    engine.settle()
