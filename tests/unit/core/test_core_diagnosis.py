"""Why nothing hits: the most telling cause comes first, and names what to change."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest

from kvpool.core.diagnosis import Evidence, likely_cause

OURS = {"model": "a", "kv_dtype": "auto", "hash_probe": "sha256:1", "hash_block_size": 16}
EVIDENCE = Evidence(
    namespace="ns1",
    inputs=json.dumps(OURS),
    records={"ns1": json.dumps(OURS)},
    pool_objects=7,
    block_size=128,
    store="backend local: neither backend nor MOONCAKE_CONFIG_PATH is set",
    unknown=0,
)


def other(**fields) -> dict[str, str]:
    return {**EVIDENCE.records, "ns2": json.dumps({**OURS, **fields})}


CAUSES = [
    ({"unknown": 3}, ["3 lookups got no answer", "backend local"]),
    ({"records": other(kv_dtype="fp8")}, ["ns2", "ns1", "kv_dtype: ours 'auto', theirs 'fp8'"]),
    ({"records": other(hash_probe="sha256:2")}, ["hash_probe: ours 'sha256:1', theirs 'sha256:2'"]),
    ({"records": other(hash_block_size=32)}, ["hash_block_size: ours 16, theirs 32"]),
    ({"records": other(kv_dtype="fp8", model="b")}, ["kv_dtype: ours", "model: ours"]),
    ({"pool_objects": 0}, ["the pool is empty", "same store and tenant", "MOONCAKE_CONFIG_PATH"]),
    ({}, ["7 objects", "shorter than a block (128 tokens)"]),
    ({"min_hit_tokens": 512}, ["below min_hit_tokens (512)"]),
]


@pytest.mark.parametrize(("facts", "parts"), CAUSES, ids=[str(sorted(facts)) for facts, _ in CAUSES])
def test_the_likely_cause_names_what_differs(facts, parts):
    told = likely_cause(replace(EVIDENCE, **facts))
    assert "\n" not in told
    for part in parts:
        assert part in told


def test_no_answers_come_before_fields_and_fields_before_an_empty_pool():
    evidence = replace(EVIDENCE, records=other(kv_dtype="fp8"), pool_objects=0)
    assert "kv_dtype" in likely_cause(evidence)
    assert "no answer" in likely_cause(replace(evidence, unknown=1))


def test_a_long_difference_is_cut():
    assert len(likely_cause(replace(EVIDENCE, records=other(model="x" * 5000)))) < 800


def test_evidence_holds_no_secret_of_a_request():
    assert set(asdict(EVIDENCE)) == {
        "namespace", "inputs", "records", "pool_objects", "block_size", "store", "unknown", "min_hit_tokens"
    }  # fmt: skip
