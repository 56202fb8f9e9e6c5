#!/usr/bin/env bash
# Make vllm-ascend/examples in a folder (default: the repository), so that commands of the deployment guide run there as they are written.
#   scripts/guide_tree.sh [DIR]
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
target=${1:-$root}/vllm-ascend/examples
mkdir -p "$target"
cp -R "$root/src/kvpool/examples/." "$target/"
echo "guide-tree: ${target}"
