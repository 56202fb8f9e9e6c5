"""The vLLM side: the only folder that imports vllm.

``kv_connector_module_path: kvpool.engine`` works too: the connector classes are attributes here, imported at first use.
"""

from __future__ import annotations

from typing import Any

POOL_NAMES = ("AscendStoreConnector", "MooncakeConnectorStoreV1")
PULL_NAME = "MooncakeConnectorV1"
CONNECTOR_NAMES = (*POOL_NAMES, PULL_NAME)


def __getattr__(name: str) -> Any:  # noqa: ANN401
    if name == PULL_NAME:
        from kvpool.engine.p2p.connector import MooncakeConnectorV1

        return MooncakeConnectorV1
    if name in POOL_NAMES:
        from kvpool.engine.connector import AscendStoreConnector

        return AscendStoreConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
