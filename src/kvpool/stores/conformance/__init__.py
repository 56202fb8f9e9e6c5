"""The suite that defines the store contract: every check uses a namespace of its own and may open the pool twice.

``make_store()`` gives a store that is not open yet; every store it makes during one check reaches the same pool, and the pool
holds at least ``MIN_CAPACITY`` bytes. A check that needs a capability the store lacks is skipped, as is one that would fill a large
pool. Run by pytest, and by ``kvpool store conformance``."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import NamedTuple

from kvpool.stores.base import Store
from kvpool.stores.conformance import objects, pieces, room
from kvpool.stores.conformance.bench import Bench, Skip

MIN_CAPACITY = 8 << 20
MakeStore = Callable[[], Store]
Check = Callable[[Bench], None]
CHECKS: tuple[Check, ...] = (
    objects.put_then_get,
    objects.segments_are_the_callers_matter,
    objects.odd_lengths,
    objects.put_again_is_exists,
    objects.results_keep_the_order_of_keys,
    objects.bc_097_a_hit_always_has_its_bytes,
    objects.another_length_is_no_hit,
    objects.bc_155_duplicates_in_a_batch,
    objects.bc_169_large_batches,
    objects.empty_calls,
    objects.misuse_is_a_value_error,
    objects.bc_092_calls_before_open_and_after_close,
    objects.open_again,
    objects.two_stores_on_one_pool,
    objects.health_and_stats,
    objects.many_threads,
    room.eviction_makes_room,
    room.bc_080_a_batch_does_not_evict_itself,
    room.a_batch_larger_than_the_pool_keeps_its_head,
    room.lease_protects,
    room.lease_runs_out,
    room.leases_are_counted,
    objects.remove_and_put_again,
    objects.remove_while_leased,
    objects.list_and_clear,
    pieces.ranged_write_is_invisible_until_commit,
    pieces.ranged_commit_of_some,
    pieces.ranged_abort,
    pieces.ranged_half_written_is_never_visible,
    pieces.ranged_read,
    pieces.reserve_publish_discard,
    pieces.publish_twice_fails,
    pieces.pin_reads_in_place,
    pieces.reserve_when_full,
)


class Outcome(NamedTuple):
    """``text`` is why a check was skipped, or how it failed."""

    check: str
    passed: bool
    skipped: bool
    text: str = ""


def run_check(check: Check, make_store: MakeStore) -> Outcome:
    """One check; closes what it opened."""
    bench = Bench(make_store)
    name = check.__name__
    try:
        check(bench)
    except Skip as skip:
        return Outcome(name, passed=False, skipped=True, text=str(skip))
    except Exception as error:  # noqa: BLE001 - a store may raise anything; that is a failed check
        where = traceback.extract_tb(error.__traceback__)[-1]
        text = f"{type(error).__name__}: {error} ({where.name}, line {where.lineno})"
        return Outcome(name, passed=False, skipped=False, text=text)
    finally:
        bench.close()
    return Outcome(name, passed=True, skipped=False)


def run_conformance(make_store: MakeStore, report: Callable[[Outcome], None]) -> tuple[int, int]:
    """Run every check; how many passed, how many failed. Skipped ones are reported but count as neither."""
    passed = failed = 0
    for check in CHECKS:
        outcome = run_check(check, make_store)
        report(outcome)
        passed += outcome.passed
        failed += not outcome.passed and not outcome.skipped
    return passed, failed
