"""The same prompts through other connectors: a freshly started engine hits what another has stored."""

from __future__ import annotations

from benchmarks import hits
from benchmarks.models import Model, smollm
from benchmarks.peer_setups import PEERS, kvpool
from benchmarks.report import Report, median
from benchmarks.settings import Settings

FIGURES = r"ttft_\w+_over_kvpool_.*|peer_.*|transfer_gbps_.*"


def run(report: Report, settings: Settings) -> None:
    """Each peer by turns with kvpool. One that cannot be installed, started or hit gives figures that are null, with the reason."""
    k, rounds, model = 1024, 2 if settings.quick else 6, smollm()
    lengths = [k] if settings.quick else [k, 2 * k, 4 * k]
    nbytes = 2 * (sum(lengths) + 4 * k) * model.token_bytes
    with kvpool(nbytes) as own:
        stored, all_ours = hits.fill(model, own, lengths), {tokens: hits.Hits() for tokens in lengths}
        for name, peer in PEERS.items():
            try:
                with peer(nbytes) as setup:
                    theirs, ours = hits.take_turns(model, [hits.fill(model, setup, lengths), stored], rounds)
            except (RuntimeError, OSError) as error:
                for tokens in lengths:
                    report.missing(f"ttft_{name}_over_kvpool_{tokens}", str(error))
                continue
            publish(report, model, name, theirs)
            for tokens in lengths:
                all_ours[tokens].add(ours[tokens])
                report.add(f"ttft_{name}_over_kvpool_{tokens}", median(theirs[tokens].store_s) / median(ours[tokens].store_s))
    if any(found.store_s for found in all_ours.values()):
        publish(report, model, "kvpool", all_ours)


def publish(report: Report, model: Model, name: str, found: dict[int, hits.Hits]) -> None:
    """The transfer rate is what is left of a hit without a device hit: steps, lookups and copies."""
    for tokens, measured in found.items():
        report.add(f"peer_{name}_hit_ms_{tokens}", median(measured.store_s) * 1e3)
        report.add(f"peer_{name}_device_hit_ms_{tokens}", median(measured.device_s) * 1e3)
        report.add(f"peer_{name}_same_answer_{tokens}", measured.same)
        rate = f"transfer_gbps_{name}_{tokens}"
        if measured.extra_s > 0:
            report.add(rate, tokens * model.token_bytes / measured.extra_s / 1e9)
        else:
            report.missing(rate, "the hit took no longer than a device hit")
