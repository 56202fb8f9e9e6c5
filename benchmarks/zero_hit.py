"""What the connector costs when it never hits: two engines side by side, one without it, that take turns on the same work."""

from __future__ import annotations

import math
import statistics
import time

import numpy as np
import psutil
from tests.engine.runner import Engine

from benchmarks.engines import STEP_S, Setup, engine, local_pool
from benchmarks.models import BLOCK, Model, smollm
from benchmarks.report import Report
from benchmarks.settings import Settings

FIGURES = r"zero_hit_.*"
PROMPT, ANSWER, REQUESTS = 512, 32, 8
# Two-sided 95 % quantiles of Student's t, by degrees of freedom.
T95 = {1: 12.71, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262, 10: 2.228, 11: 2.201, 12: 2.179}


def run(report: Report, settings: Settings) -> None:
    """Pool and device caches are smaller than what is stored, so both evict all the time, as in a long life."""
    model, pairs = smollm(), 2 if settings.quick else 12
    room = 2 * REQUESTS * (PROMPT + ANSWER + BLOCK)
    shape = {"longest": PROMPT + ANSWER, "kv_tokens": room, "seqs": REQUESTS}
    with (
        local_pool("bench-zero-hit", room * model.token_bytes) as setup,
        engine(model, Setup("none"), **shape) as without,
        engine(model, setup, **shape) as connected,
    ):
        for seed in (1, 2):
            for running in (without, connected):
                rate(running, model, seed)
        idle, ratios, costs = 0.0, [], []
        for pair in range(pairs):
            order = (without, connected) if pair % 2 else (connected, without)
            speed, cpu = {}, {}
            for running, waiting in (order, order[::-1]):
                before, waited = cpu_seconds(running), cpu_seconds(waiting)
                speed[running] = rate(running, model, 10 + pair)
                cpu[running] = cpu_seconds(running) - before
                idle = max(idle, (cpu_seconds(waiting) - waited) * speed[running] / (REQUESTS * (PROMPT + ANSWER)))
            ratios.append(speed[connected] / speed[without])
            costs.append(cpu[without] / cpu[connected])
            print(f"bench: pair {pair}: {ratios[-1]:.4f}, by CPU time {costs[-1]:.4f}", flush=True)
        saved = sum(value for name, _, value in connected.metrics() if name.endswith("saved_blocks_total"))
    low, middle, high = interval(ratios)
    report.add("zero_hit_ratio", middle)
    report.add("zero_hit_ratio_low", low)
    report.add("zero_hit_ratio_high", high)
    report.add("zero_hit_cpu_ratio", interval(costs)[1])
    report.add("zero_hit_pairs", pairs)
    report.add("zero_hit_tokens_per_s", speed[connected])
    report.add("zero_hit_saved_share", saved / ((pairs + 2) * REQUESTS * (PROMPT // BLOCK)))
    report.add("zero_hit_idle_engine_cpu", idle)


def rate(running: Engine, model: Model, seed: int) -> float:
    """Tokens a second, prompts included, until the engine has nothing left to do: what it still saves counts."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(3, model.vocab, PROMPT).tolist() for _ in range(REQUESTS)]
    began = time.perf_counter()
    results = running.generate(prompts, STEP_S, max_tokens=ANSWER)
    running.do("wait_idle")
    seconds = time.perf_counter() - began
    if any(result["error"] or result["num_cached_tokens"] for result in results):
        raise RuntimeError("a request failed or hit something")
    return REQUESTS * (PROMPT + ANSWER) / seconds


def cpu_seconds(running: Engine) -> float:
    """CPU time that the processes of an engine have used so far."""
    times = [psutil.Process(pid).cpu_times() for pid in running.processes().values()]
    return float(sum(t.user + t.system for t in times))


def interval(ratios: list[float]) -> tuple[float, float, float]:
    """The geometric mean of paired ratios and its 95 % interval, by Student's t on their logarithms: low, mean, high."""
    logs = [math.log(ratio) for ratio in ratios]
    mean = statistics.fmean(logs)
    half = T95[len(logs) - 1] * statistics.stdev(logs) / math.sqrt(len(logs))
    return math.exp(mean - half), math.exp(mean), math.exp(mean + half)
