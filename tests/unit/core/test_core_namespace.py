"""Namespaces: every field counts, nothing else does, and a difference is told by name."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields, replace

import pytest

from kvpool.core.namespace import NamespaceInputs, differing_fields

BASE = NamespaceInputs(
    model="sha256:0",
    kv_dtype="auto/torch.float32",
    page_format="CPU_ATTN/vec/123",
    token_head_bytes=(512,),
    groups=("full/16/0",),
    num_layers=4,
    hash_block_size=16,
    hash_probe="sha256:00",
)
OTHERS = {
    "model": "sha256:1",
    "kv_dtype": "auto/torch.bfloat16",
    "page_format": "CPU_ATTN/amx/123",
    "token_head_bytes": (256,),
    "groups": ("full/32/0",),
    "num_layers": 5,
    "hash_block_size": 32,
    "hash_probe": "sha256:01",
    "epoch": "reset-1",
    "object_format": 2,
    "extra": {"a": "b"},
}


def test_every_field_has_a_case():
    assert set(OTHERS) == {f.name for f in fields(NamespaceInputs)}


@pytest.mark.parametrize("name", OTHERS)
def test_every_field_changes_the_digest_and_is_named(name):
    other = replace(BASE, **{name: OTHERS[name]})
    assert other.digest != BASE.digest
    assert list(differing_fields(BASE.to_json(), other.to_json())) == [name]


def test_the_digest_is_that_of_every_process():
    code = (
        "from kvpool.core.namespace import NamespaceInputs as N;"
        f"print(N(**{ {f.name: getattr(BASE, f.name) for f in fields(BASE)}!r}).digest)"
    )
    for seed in ("0", "1"):
        env = {"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(filter(None, sys.path))}
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
        assert done.stdout.strip() == BASE.digest


def test_the_order_of_extra_does_not_count():
    one, other = replace(BASE, extra={"a": "1", "b": "2"}), replace(BASE, extra={"b": "2", "a": "1"})
    assert one.digest == other.digest


def test_the_digest_is_sixteen_hex_digits():
    assert len(BASE.digest) == 16
    int(BASE.digest, 16)


@pytest.mark.parametrize("text", ["", "no json", "[1]", "7"])
def test_what_is_no_record_differs_in_nothing(text):
    assert differing_fields(BASE.to_json(), text) == {}
    assert differing_fields(text, BASE.to_json()) == {}


def test_a_field_that_one_record_lacks_is_named():
    assert differing_fields('{"a": 1}', '{"a": 1, "b": 2}') == {"b": (None, 2)}
