"""What the operator reads: few lines, each short, with counts and reasons."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging

from kvpool.engine.log_gate import LogGate
from kvpool.engine.stats import PoolStats
from kvpool.engine.watch import summary
from kvpool.stores.base import Result, Status

PROMPT = list(range(100, 200))  # 6 full blocks and 4 tokens


def test_vllms_own_log_line_stays_one_short_line(start):
    lines: list[str] = []
    log = KVConnectorLogging(None)
    log.connector_cls = SimpleNamespace(build_kv_connector_stats=lambda data: PoolStats(data=data))
    for _ in range(100):
        stats = PoolStats()
        for _ in range(100):
            stats.observe("lookup_seconds", 0.001)
            stats.add("misses/reason=absent")
        log.observe(stats.to_dict())
    log.log(lambda text, *args: lines.append(text % args))
    assert len(lines) == 1
    assert "lookup_seconds count=10000" in lines[0]
    assert len(lines[0]) < 500


def test_bc_012_failures_of_thousands_of_keys_are_a_few_short_lines(start, caplog_vllm):
    """5,000 blocks that cannot be stored, in many jobs."""
    engine = start(num_blocks=1200, max_tokens_per_step=4096, max_seqs=8)
    engine.ranks[0].worker_side._transfers._log = LogGate(10.0, lambda: 0.0)  # however long it takes
    engine.store.fail_keys("put", lambda key: True, Result(Status.NO_SPACE))
    for i in range(5):
        engine.ask(f"a{i}", [(7 * i + t) % 1900 for t in range(16 * 1000)])
    engine.settle()
    lines = [r.getMessage() for r in caplog_vllm if "Failed to put" in r.getMessage()]
    assert 1 <= len(lines) <= 2
    assert sum(map(len, lines)) < 1000
    assert "keys out of" in lines[0]
    assert "error_codes=['no_space']" in lines[0]
    assert len(max((r.getMessage() for r in caplog_vllm if r.levelno > logging.DEBUG), key=len)) < 2000


@pytest.fixture
def caplog_vllm():
    """Records of kvpool's logger, which does not propagate."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler(logging.DEBUG)
    handler.emit = records.append
    logger = logging.getLogger("vllm.kvpool")
    logger.addHandler(handler)
    level = logger.level
    logger.setLevel(logging.DEBUG)
    yield records
    logger.setLevel(level)
    logger.removeHandler(handler)


def test_one_line_at_the_start_says_what_is_used_and_one_the_namespace(start, caplog_vllm):
    def lines(words):
        return [record.getMessage() for record in caplog_vllm if words in record.getMessage()]

    engine = start(policy="recompute")
    engine.ask("a", PROMPT)
    engine.until(lambda: lines("kvpool: namespace"))
    engine.ask("b", PROMPT)
    (used,), (namespace,) = lines("all ranks have met"), lines("kvpool: namespace")
    assert engine.pool._agreement.namespace in namespace
    for part in ("backend local", f"capacity {1 << 30} bytes", "policy recompute", "asynchronous loads"):
        assert part in used


def test_the_summary_has_reasons_and_tiers_on_one_line():
    window = {
        "lookups": 10, "hits": 4, "misses/reason=evicted": 5, "misses/reason=absent": 1, "queried_tokens": 1000, "hit_tokens": 250,
        "loaded_tokens/tier=dram": 200, "loaded_tokens/tier=disk": 50, "loaded_bytes/tier=dram": 3e6,
        "dropped_blocks/reason=pinned": 3,
    }  # fmt: skip
    text = summary(window)
    assert "10 lookups, 4 with a hit, 6 without (evicted 5, absent 1)" in text
    assert "25.0 % of 1000 tokens" in text
    assert "loaded 250 tokens (dram 200, disk 50), 3.0 MB (dram 3.0)" in text
    assert "dropped 3 (pinned 3)" in text
    assert "\n" not in text


def test_a_gate_tells_how_much_it_kept_back():
    now = [0.0]
    gate = LogGate(10.0, lambda: now[0])
    assert [gate.ask("put") for _ in range(3)] == ["", None, None]
    assert gate.ask("get") == ""
    now[0] = 10.0
    assert gate.ask("put") == " (and 2 like it since the last such line)"
