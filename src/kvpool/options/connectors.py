"""Names of connectors: ours, ours of the past, vLLM's own, and what to say about each."""

from __future__ import annotations

import difflib

from kvpool.options.errors import OptionError
from kvpool.options.fields import located

POOL = "AscendStoreConnector"
POOL_OLD_NAME = "MooncakeConnectorStoreV1"
PULL = "MooncakeConnectorV1"
REMOTE_D2H = "SfaRemoteD2HConnector"
MULTI = "MultiConnector"
OURS = (POOL, PULL, REMOTE_D2H)
OUT_OF_SCOPE = {
    "MooncakeLayerwiseConnector": "is not part of kvpool: use SfaRemoteD2HConnector or MooncakeConnectorV1",
    "MooncakeHybridConnector": "is chosen by MooncakeConnectorV1 itself and cannot be configured",
}
VLLM_OWN = (
    "DecodeBenchConnector",
    "ExampleConnector",
    "ExampleHiddenStatesConnector",
    "FlexKVConnectorV1",
    "HF3FSKVConnector",
    "HiSparseConnector",
    "LMCacheConnectorV1",
    "LMCacheMPConnector",
    "MoRIIOConnector",
    "MooncakeConnector",
    "MooncakeStoreConnector",
    "NixlConnector",
    "NixlPullConnector",
    "NixlPushConnector",
    "OffloadingConnector",
    "SimpleCPUOffloadConnector",
)
"""Registered by vLLM 0.32; their options are not ours to judge."""


def check_connector(name: object, module_path: object, where: str) -> tuple[str, list[str]]:
    """The connector's present name, and warnings. Names that a module path loads are taken as they are."""
    if not isinstance(name, str) or not name:
        raise OptionError("kv_connector", name, f"is required: {', '.join(OURS)} or {MULTI}", where=where)
    if name == POOL_OLD_NAME:
        return POOL, [located(where, f"kv_connector {POOL_OLD_NAME} is deprecated: use {POOL}")]
    if name in OUT_OF_SCOPE:
        raise OptionError("kv_connector", name, OUT_OF_SCOPE[name], where=where)
    if name in (*OURS, MULTI, *VLLM_OWN) or module_path:
        return name, []
    near = difflib.get_close_matches(name, [*OURS, MULTI, *VLLM_OWN], n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]}?" if near else ""
    accepted = f"accepted: {', '.join(OURS)}, {MULTI}, vLLM's own, and with kv_connector_module_path any other"
    raise OptionError("kv_connector", name, f"is unknown ({accepted}){hint}", where=where)
