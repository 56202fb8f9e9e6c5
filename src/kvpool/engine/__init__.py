"""The vLLM side: the only folder that imports vllm.

``kv_connector_module_path: kvpool.engine`` works too: the connector classes are attributes here, imported at first use.
"""

from __future__ import annotations

from typing import Any

CONNECTOR_NAMES = ("AscendStoreConnector", "MooncakeConnectorStoreV1")


def __getattr__(name: str) -> Any:  # noqa: ANN401
    if name in CONNECTOR_NAMES:
        from kvpool.engine.connector import AscendStoreConnector

        return AscendStoreConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
