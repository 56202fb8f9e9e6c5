#!/usr/bin/env bash
# Install the system packages that the stores' engines need in tests (Debian and Ubuntu, as root or with sudo). Does nothing when all
# are there. `make test` never installs anything system-wide: it skips, and lists, what cannot run without them.
set -euo pipefail

packages=(
    libibverbs1 librdmacm1 libnuma1 liburing2 libcurl4  # Mooncake
    gcc libc6-dev                                        # the driver stand-in for MemCache and MemFabric
    etcd-server                                          # openYuanrong with etcd
    iproute2 util-linux                                  # network and mount namespaces
)

missing=()
for package in "${packages[@]}"; do
    [[ $(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null) == installed ]] || missing+=("$package")
done
if ((${#missing[@]} == 0)); then
    echo "deps: nothing to install"
    exit 0
fi
command -v apt-get >/dev/null || { echo "deps: error: no apt-get here; install what corresponds to: ${missing[*]}" >&2; exit 1; }
as_root=()
((EUID == 0)) || as_root=(sudo)
echo "deps: installing ${missing[*]}"
"${as_root[@]}" apt-get update -q
DEBIAN_FRONTEND=noninteractive "${as_root[@]}" apt-get install -y -q --no-install-recommends "${missing[@]}"
