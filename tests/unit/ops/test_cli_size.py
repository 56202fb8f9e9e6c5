"""`kvpool size`: where the model comes from, what is printed, and the exit status."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from tests.unit.ops.sizing_models import GIB, QWEN3_32B
from typer.testing import CliRunner

from kvpool.cli import app

WORK = ["--tokens", "1024", "--concurrency", "2"]


@pytest.fixture
def model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_32B))
    return tmp_path


def run(*words):
    return CliRunner().invoke(app, ["size", *map(str, words)], env={"COLUMNS": "200"})


def figures(*words):
    told = run(*words, "--json")
    return {one["name"]: one for section in json.loads(told.stdout)["sections"] for one in section["figures"]}


def test_every_figure_has_value_unit_formula_and_source(model):
    every = figures(model, *WORK, "--disk-size", "800GB", "--ubsio-memory", "200GB", "--fabric", "--dies", 8)
    assert len(every) > 20
    for one in every.values():
        assert one["value"] > 0 or one["name"] == "connection_bytes_per_device"
        assert one["formula"]
        assert one["source"]
        assert one["unit"] in ("bytes", "GB", "MB", "count", "share")
    assert every["kv_bytes_total"]["value"] == 2048 * 262144


def test_a_folder_and_its_file_are_the_same_model(model):
    assert figures(model, *WORK) == figures(model / "config.json", *WORK)


def test_tables_show_formulas(model):
    told = run(model, *WORK)
    assert told.exit_code == 0
    assert "64 layers x 8 KV heads x 256 (K and V) x 2 bytes" in told.stdout
    assert "536,870,912 (0.50 GiB)" in told.stdout


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("--ubsio-size", 3), "error: --ubsio-size=3: is of use only with --ubsio-memory"),
        (("--kv-memory", "1GB"), "error: --kv-memory=1073741824: is of use only with --disk-size or --offload-buffer"),
        (("--dram-per-dp", 3), "error: --dram-per-dp=3: is of use only with --topk-buffer"),
        (("--fabric", "--backend", "memcache"), "error: --fabric=true: is of mooncake, but the store is memcache"),
        (("--huge-pages", 3, "--backend", "mooncake"), "error: --huge-pages=3: is of yuanrong, but the store is mooncake"),
    ],
)
def test_no_option_is_ignored(model, words, line):
    told = run(model, *WORK, *words)
    assert (told.exit_code, told.output.strip()) == (2, line)


@pytest.mark.parametrize("width", [50, 80])
def test_tables_cut_nothing_off(model, width):
    asked = [model, "--tokens", 131072, "--concurrency", 64, "--disk-size", "800GB", "--ubsio-memory", "200GB", "--fabric"]
    every = figures(*asked)
    told = CliRunner().invoke(app, ["size", *map(str, asked)], env={"COLUMNS": str(width)}).stdout
    assert "…" not in told
    cells = {cell.strip() for line in told.splitlines() for cell in line.split("│")}
    assert set(every) <= cells, "names stay whole"
    if width == 80:
        words = {word for cell in cells for word in cell.split()}
        assert {f"{one['value']:,}" for one in every.values() if one["unit"] in ("bytes", "count")} <= words, "numbers too"


@pytest.mark.parametrize("text", ["1GB", "1024MB", "1048576KB", "1073741824B", "1073741824"])
def test_sizes_are_written_as_in_mooncake_json(model, text):
    """The KV pool guide, 2.2.1, lists these five."""
    assert figures(model, *WORK, "--dram-size", text)["pool_capacity"]["value"] == GIB


def test_what_would_not_work_exits_with_1_and_names_the_fix(model):
    told = run(model, *WORK, "--host-memory", "1023MB")
    assert told.exit_code == 1
    assert "would not work: --host-memory: " in told.stdout
    document = json.loads(run(model, *WORK, "--host-memory", "1023MB", "--json").stdout)
    assert document["ok"] is False
    assert "--host-memory" in [one["key"] for section in document["sections"] for one in section["findings"] if one["problem"]]


@pytest.mark.parametrize(
    ("settings", "tokens", "warned"),
    [
        ({"max_position_embeddings": 40960}, 40960, False),
        ({"max_position_embeddings": 40960}, 40961, True),
        ({"max_position_embeddings": 40960, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}, 81920, False),
        ({"max_position_embeddings": 40960, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, 81921, True),
        ({"max_position_embeddings": 40960, "rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, 40961, True),
        ({"max_position_embeddings": 163840, "rope_scaling": None}, 100_000, False),
        ({"max_position_embeddings": None}, 100_000, False),
    ],
)
def test_more_tokens_than_the_model_takes_are_a_warning(model, settings, tokens, warned):
    words = ["--tokens", tokens, "--concurrency", 1, "--backend", "local", "--hf-overrides", json.dumps(settings)]
    told = run(model, *words)
    assert told.exit_code == 0
    line = f"warning: --tokens: {tokens} tokens are more than the "
    assert (line in told.stdout) is warned


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["/nonexistent/model", *WORK], "MODEL="),
        (["MODEL", *WORK, "--tp", "3"], "--tp=3"),
        (["MODEL", *WORK, "--hf-overrides", "{"], "--hf-overrides"),
        (["MODEL", *WORK, "--hf-overrides", '{"num_key_value_heads": 0}'], "num_key_value_heads=0"),
        (["MODEL", *WORK, "--layerwise-buffers", "2", "--layerwise-independent", "0,1"], "layerwise_independent_layers"),
    ],
)
def test_a_wrong_question_exits_with_2_in_one_line(model, words, named):
    told = run(*[model if word == "MODEL" else word for word in words])
    assert told.exit_code == 2
    assert told.stderr.startswith("error: ")
    assert told.stderr.count("\n") == 1
    assert named in told.stderr


@pytest.mark.parametrize("words", [["--dram-size", "1G"], ["--tokens", "0"], ["--kv-dtype", "int3"]])
def test_values_that_are_none_exit_with_2(model, words):
    told = run(model, *WORK, *words)
    assert told.exit_code == 2
    assert words[0] in told.stderr


def test_a_folder_without_config_and_broken_json_are_told(tmp_path):
    assert "without config.json" in run(tmp_path, *WORK).stderr
    (tmp_path / "config.json").write_text("[1]")
    told = run(tmp_path, *WORK)
    assert told.exit_code == 2
    assert "config.json: line 1: expected an object" in told.stderr


def test_a_hub_name_needs_huggingface_hub(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    told = run("owner/name", *WORK)
    assert told.exit_code == 2
    assert "huggingface_hub" in told.stderr


def test_a_hub_name_is_fetched_where_huggingface_hub_is(monkeypatch, model):
    hub = pytest.importorskip("huggingface_hub")
    asked = []
    monkeypatch.setattr(hub, "hf_hub_download", lambda *words, **more: asked.append(words) or str(model / "config.json"))
    assert run("owner/name", *WORK).exit_code == 0
    assert asked == [("owner/name", "config.json")]


def test_a_hub_that_fails_is_one_line(monkeypatch):
    hub = pytest.importorskip("huggingface_hub")

    def fail(*words, **more):
        raise OSError("no route\nmore")

    monkeypatch.setattr(hub, "hf_hub_download", fail)
    told = run("owner/name", *WORK)
    assert told.exit_code == 2
    assert "OSError: no route)" in told.stderr


def test_a_store_shows_its_own_figures_and_its_refusals_become_problems(model):
    """Two sequences in one GiB: an eviction of Mooncake leaves too little room for both at once."""
    assert run(model, *WORK).exit_code == run(model, *WORK, "--backend", "local").exit_code == 0
    assert "warning: --eviction-ratio" in run(model, *WORK).stdout
    told = run(model, *WORK, "--backend", "mooncake")
    assert told.exit_code == 1
    assert "would not work: --eviction-ratio" in told.stdout
    assert "huge_pages" in figures(model, *WORK, "--backend", "yuanrong")
    for store in ("local", "memcache"):
        assert not {"huge_pages", "eviction_headroom", "host_memory_mooncake"} & set(figures(model, *WORK, "--backend", store))


def test_overrides_win_over_config_json(model):
    told = figures(model, *WORK, "--hf-overrides", '{"num_hidden_layers": 32}')
    assert told["kv_bytes_per_token"]["value"] == 131072


def test_it_needs_neither_vllm_nor_a_store(model):
    """In a process where importing any of them fails."""
    blocked = ["vllm", "torch", "transformers", "mooncake", "memcache_hybrid", "yr", "lmdb", "zmq", "numpy"]
    code = f"import sys; sys.modules.update(dict.fromkeys({blocked})); from kvpool.cli import app; app()"
    done = subprocess.run([sys.executable, "-c", code, "size", str(model), *WORK], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "kv_bytes_total" in done.stdout
