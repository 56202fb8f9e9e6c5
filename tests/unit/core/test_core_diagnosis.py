"""Why nothing hits: the most telling cause comes first, and names what to change."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest

from kvpool.core.diagnosis import Evidence, diagnose, likely_cause

OURS = {"model": "a", "kv_dtype": "auto", "hash_probe": "sha256:1", "hash_block_size": 16}
EVIDENCE = Evidence(
    namespace="ns1",
    inputs=json.dumps(OURS),
    records={"ns1": json.dumps(OURS)},
    pool_objects=7,
    own_objects=7,
    block_size=128,
    store="backend local: neither backend nor MOONCAKE_CONFIG_PATH is set; address /dev/shm/p, tenant t1",
    lookups=100,
    unknown=0,
)


def other(**fields) -> dict[str, str]:
    return {**EVIDENCE.records, "ns2": json.dumps({**OURS, **fields})}


CAUSES = [
    ({"unknown": 60}, ["60 of 100 lookups got no answer: is the store up?", "backend local"]),
    ({"records": other(kv_dtype="fp8")}, ["ns2", "ns1", "kv_dtype: ours 'auto', theirs 'fp8'"]),
    ({"records": other(hash_probe="sha256:2")}, ["hash_probe: ours 'sha256:1', theirs 'sha256:2'"]),
    ({"records": other(hash_block_size=32)}, ["hash_block_size: ours 16, theirs 32"]),
    ({"records": other(kv_dtype="fp8", model="b")}, ["kv_dtype: ours", "model: ours"]),
    ({"pool_objects": 0}, ["the pool is empty", "same store and tenant", "MOONCAKE_CONFIG_PATH"]),
    ({}, ["7 objects,", "shorter than a block (128 tokens)", "no engine of another namespace has left its record here"]),
    ({}, ["same store and tenant", "neither backend nor MOONCAKE_CONFIG_PATH is set", "address /dev/shm/p", "tenant t1"]),
    ({"own_objects": 3}, ["7 objects, 3 of this engine at most", "MOONCAKE_CONFIG_PATH"]),
    ({"pool_objects": None}, ["is not empty as far as it can tell", "MOONCAKE_CONFIG_PATH", "tenant t1"]),
    ({"min_hit_tokens": 512}, ["below min_hit_tokens (512)"]),
]


@pytest.mark.parametrize(("facts", "parts"), CAUSES, ids=[str(sorted(facts)) for facts, _ in CAUSES])
def test_the_likely_cause_names_what_differs(facts, parts):
    told = likely_cause(replace(EVIDENCE, **facts))
    assert "\n" not in told
    for part in parts:
        assert part in told


def test_no_answers_come_first_only_where_they_are_most():
    """One timeout among a hundred lookups does not hide a namespace that differs."""
    evidence = replace(EVIDENCE, records=other(kv_dtype="fp8"), pool_objects=0)
    assert "the pool holds namespace ns2" in likely_cause(evidence)
    for few in (1, 49):
        told = likely_cause(replace(evidence, unknown=few))
        assert told.startswith("the pool holds namespace ns2")
        assert told.endswith(f"; {few} of 100 lookups got no answer")
    for many in (50, 100):
        assert likely_cause(replace(evidence, unknown=many)).startswith(f"{many} of 100 lookups got no answer")


def test_few_lookups_without_an_answer_are_told_behind_any_cause():
    for facts in ({}, {"pool_objects": 0}):
        assert likely_cause(replace(EVIDENCE, unknown=2, **facts)).endswith("; 2 of 100 lookups got no answer")


@pytest.mark.parametrize("records", [{**EVIDENCE.records, "ns2": "no record"}, {}], ids=["another record", "none could be read"])
def test_other_engines_are_denied_only_where_the_records_are_ours_alone(records):
    assert "no engine of another namespace" not in likely_cause(replace(EVIDENCE, records=records))


ALARMING = [
    ({"records": other(kv_dtype="fp8")}, True, "another namespace"),
    ({"own_objects": 6}, True, "objects that this engine cannot have saved"),
    ({"unknown": 50}, True, "no answers"),
    ({"own_objects": None, "pool_objects": 0}, True, "it saves nothing, so others must"),
    ({}, False, "all objects may be its own"),
    ({"own_objects": 500}, False, "what was evicted, or not stored, is no more than it offered"),
    ({"pool_objects": 0}, False, "nobody has saved"),
    ({"pool_objects": None}, False, "nobody else is known of"),
    ({"unknown": 49}, False, "most lookups were answered"),
    ({"records": other(epoch="reset-1")}, False, "its own namespace of before a reset"),
    ({"records": {}}, False, "not even its own record"),
]


@pytest.mark.parametrize(("facts", "alarming", "why"), ALARMING, ids=[why for _, _, why in ALARMING])
def test_it_alarms_only_where_hits_were_to_be_expected(facts, alarming, why):
    assert diagnose(replace(EVIDENCE, **facts)).alarming is alarming


def test_a_long_difference_is_cut():
    assert len(likely_cause(replace(EVIDENCE, records=other(model="x" * 5000)))) < 800


def test_evidence_holds_no_secret_of_a_request():
    assert set(asdict(EVIDENCE)) == {
        "namespace", "inputs", "records", "pool_objects", "own_objects", "block_size", "store", "lookups", "unknown",
        "min_hit_tokens",
    }  # fmt: skip
