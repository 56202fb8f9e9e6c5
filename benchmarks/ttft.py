"""What a hit in the pool costs over a hit on the device, and what it saves over computing."""

from __future__ import annotations

from benchmarks import hits
from benchmarks.engines import local_pool
from benchmarks.models import Model, kv_heavy, smollm
from benchmarks.report import Report, median
from benchmarks.settings import Settings

FIGURES = r"ttft_(pool|device|recompute).*|speedup_.*|memcpy_rate_.*"


def run(report: Report, settings: Settings) -> None:
    k, rounds = 1024, 2 if settings.quick else 8
    plan = [(smollm(), [k] if settings.quick else [k, 2 * k, 4 * k])]
    plan.append((kv_heavy(), [k] if settings.quick else [2 * k, 4 * k, 8 * k]))
    for model, lengths in plan:
        pool_bytes = (sum(lengths) + 4 * k) * model.token_bytes * 5 // 4
        with local_pool("bench-ttft", pool_bytes) as setup:
            found = hits.measure(model, setup, lengths, rounds)
        for tokens, measured in found.items():
            publish(report, model, tokens, measured)


def publish(report: Report, model: Model, tokens: int, measured: hits.Hits) -> None:
    """The figures of one model at one length. Every answer must be the one that was computed."""
    if not measured.same:
        raise RuntimeError(f"{model.name}, {tokens} tokens: a hit gave another answer")
    label, rate = f"{model.name}_{tokens}", median(measured.rates)
    pool_s, device_s = median(measured.store_s), median(measured.device_s)
    report.add(f"ttft_recompute_ms_{label}", measured.cold_s * 1e3)
    report.add(f"ttft_device_hit_ms_{label}", device_s * 1e3)
    report.add(f"ttft_pool_hit_ms_{label}", pool_s * 1e3)
    report.add(f"ttft_pool_first_hit_ms_{label}", measured.first_s * 1e3)
    report.add(f"ttft_pool_extra_ms_{label}", measured.extra_s * 1e3)
    report.add(f"ttft_pool_extra_bound_ms_{label}", (1.3 * tokens * model.token_bytes / rate + 0.010) * 1e3)
    report.add(f"memcpy_rate_gbps_{label}", rate / 1e9)
    report.add(f"speedup_{label}", measured.cold_s / pool_s)
