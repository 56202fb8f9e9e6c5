"""What a script does before it starts something on an NPU host: the toolkit's variables, and where a store's libraries lie."""

from __future__ import annotations

from kvpool.ops.launch.series import Series

TOOLKITS = ("/usr/local/Ascend/ascend-toolkit/set_env.sh", "/usr/local/Ascend/nnal/atb/set_env.sh")
PACKAGES = {"mooncake": "mooncake", "memcache": "memcache_hybrid"}


def toolkit(series: Series) -> str:
    """Lines that set CANN's variables. Its scripts are not written for ``set -e``: a test in them that fails must not end ours."""
    if not series.npu:
        return ""
    missing = '{ echo "$file is not there: install CANN" >&2; exit 1; }'
    return f'for file in {" ".join(TOOLKITS)}; do\n    [ -r "$file" ] || {missing}\n    set +e; source "$file"; set -e\ndone\n\n'


def libraries(series: Series, backend: str) -> str:
    """Lines that name a store's libraries. Where its package lies is asked, not guessed: it depends on the Python."""
    package = PACKAGES.get(backend)
    if package is None or not series.npu:
        return ""
    lines = f"package={_folder_of(package)}\n"
    lines += 'export LD_LIBRARY_PATH="$package:$package/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"\n'
    if backend == "memcache":  # device protocols load more libraries; an installation from source has its own folder
        lines += f"fabric={_folder_of('memfabric_hybrid')}\n"
        lines += 'export MEMFABRIC_HYBRID_EXTEND_LIB_PATH="${MEMFABRIC_HYBRID_EXTEND_LIB_PATH:-$fabric/lib}"\n'
    return lines


def _folder_of(package: str) -> str:
    code = f"import importlib.util; print(importlib.util.find_spec('{package}').submodule_search_locations[0])"
    return f'$(python -c "{code}")'
