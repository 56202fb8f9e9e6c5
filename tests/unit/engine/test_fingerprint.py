"""Weights and adapters are told by content, wherever they lie."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from kvpool.engine.adapters import AdapterDigests
from kvpool.engine.fingerprint import weights_digest

TENSORS = 40
TENSOR_BYTES = 100_000


def write_safetensors(path: Path, seed: int = 0, changed: int | None = None) -> None:
    """A file of many tensors; ``changed`` names one whose values differ throughout."""
    header, data = {}, b""
    for i in range(TENSORS):
        values = np.random.default_rng(seed + i + (1000 if i == changed else 0)).integers(0, 256, TENSOR_BYTES, dtype=np.uint8)
        header[f"t{i}"] = {"dtype": "U8", "shape": [TENSOR_BYTES], "data_offsets": [len(data), len(data) + TENSOR_BYTES]}
        data += values.tobytes()
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    write_safetensors(folder / "model.safetensors")
    return folder


def test_the_same_weights_elsewhere_are_the_same(model: Path, tmp_path: Path) -> None:
    copy = tmp_path / "another name"
    shutil.copytree(model, copy)
    assert weights_digest(model) == weights_digest(copy)


@pytest.mark.parametrize("changed", range(0, TENSORS, 7))
def test_a_change_of_any_one_tensor_is_seen(model: Path, tmp_path: Path, changed: int) -> None:
    """A merge that touches a few tensors must not escape: every tensor is sampled."""
    other = tmp_path / "other"
    other.mkdir()
    write_safetensors(other / "model.safetensors", changed=changed)
    assert weights_digest(model) != weights_digest(other)


def test_files_of_unknown_kind_and_damaged_headers_are_sampled(tmp_path: Path) -> None:
    for name in ("a.bin", "b.safetensors"):
        one, two = tmp_path / f"one-{name}", tmp_path / f"two-{name}"
        data = bytearray(os.urandom(3 << 20))
        one.write_bytes(data)
        data[:] = os.urandom(len(data))
        two.write_bytes(data)
        assert weights_digest(one) != weights_digest(two)
        assert weights_digest(one) == weights_digest(one)


def test_a_folder_without_weights_has_no_digest(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert weights_digest(tmp_path) is None


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    folder = tmp_path / "adapter"
    folder.mkdir()
    write_safetensors(folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text('{"lora_alpha": 16}')
    return folder


def test_bc_042_an_adapter_is_known_by_its_files(adapter: Path, tmp_path: Path) -> None:
    copy = tmp_path / "elsewhere"
    shutil.copytree(adapter, copy)
    digest = AdapterDigests().digest(str(adapter))
    assert digest
    assert digest == AdapterDigests().digest(str(copy))
    (copy / "adapter_config.json").write_text('{"lora_alpha": 32}')
    assert AdapterDigests().digest(str(copy)) not in (digest, None), "the same weights under another scale are another adapter"
    write_safetensors(adapter / "adapter_model.safetensors", seed=500)
    assert AdapterDigests().digest(str(adapter)) not in (digest, None)
    assert AdapterDigests().digest(str(tmp_path / "gone")) is None


def test_an_adapter_that_changes_while_the_engine_runs_is_not_pooled_any_more(adapter: Path) -> None:
    """The worker may or may not have loaded the new files: nobody can say what its KV is computed with."""
    digests = AdapterDigests()
    before = digests.digest(str(adapter))
    assert before
    (adapter / "adapter_config.json").write_text('{"lora_alpha": 64}')
    assert digests.digest(str(adapter)) is None
    assert before in digests.retired
    assert digests.digest(str(adapter)) is None
