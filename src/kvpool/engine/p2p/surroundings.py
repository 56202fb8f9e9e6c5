"""The pool connector that may stand beside us in a MultiConnector, named so that both sides can compare."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from kvpool.engine.setup import host_identity
from kvpool.options import load_ascend_store
from kvpool.options.connectors import POOL, POOL_OLD_NAME
from kvpool.options.deployment import Deployment
from kvpool.options.record import store_record

if TYPE_CHECKING:
    from vllm.config.kv_transfer import KVTransferConfig


def pool_beside(parent: KVTransferConfig | None, deployment: Deployment) -> dict[str, str]:
    """Its backend, address and tenant; empty without one. Wrong options are told by that connector itself, not here."""
    for child in (parent.kv_connector_extra_config if parent is not None else {}).get("connectors", []):
        if child.get("kv_connector") not in (POOL, POOL_OLD_NAME):
            continue
        extra = child.get("kv_connector_extra_config") or {}
        try:
            loaded = load_ascend_store(extra, kv_role=child.get("kv_role"), env=os.environ, deployment=deployment)
        except ValueError:
            return {}
        options, file = loaded.options, loaded.backend_file
        if file is not None:
            record = store_record(options.backend, file.options)
            return {"backend": record.kind, "address": record.endpoint, "tenant": record.tenant or "default"}
        from kvpool.stores.local.pool_dir import default_root

        folder = f"{options.local_pool_root or default_root()}/{options.local_pool_name}"
        return {"backend": options.backend, "address": f"{folder} on host {host_identity()}", "tenant": "default"}
    return {}
