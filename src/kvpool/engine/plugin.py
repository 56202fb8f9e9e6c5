"""The ``vllm.general_plugins`` entry point: registers our connectors by name, in every vLLM process.

Beside an installed vllm_ascend, which registers the same names, we register nothing, unless ``KVPOOL_TAKEOVER=1`` says that ours
win. vLLM raises on a duplicate name and loads plugins in no promised order, so taking over also ignores later registrations.
"""

from __future__ import annotations

import importlib.util
import os
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.logger import init_logger

from kvpool.engine import CONNECTOR_NAMES

logger = init_logger("vllm.kvpool")

MODULE = "kvpool.engine"


def register() -> None:
    """Idempotent: vLLM calls it several times in each process."""
    takeover = os.environ.get("KVPOOL_TAKEOVER", "0").strip() in ("1", "true", "True")
    if takeover:
        _take_over()
        return
    rival = importlib.util.find_spec("vllm_ascend") is not None
    for name in CONNECTOR_NAMES:
        if rival or name in KVConnectorFactory._registry:
            if not _is_ours(name):
                logger.warning_once(
                    "kvpool: %s is left to %s; set KVPOOL_TAKEOVER=1, or kv_connector_module_path to %s, to use kvpool's.",
                    name,
                    "vllm_ascend" if rival else "another plugin",
                    MODULE,
                )
            continue
        KVConnectorFactory.register_connector(name, MODULE, name)


def _is_ours(name: str) -> bool:
    loader = KVConnectorFactory._registry.get(name)
    return loader is not None and loader.__closure__ is not None and MODULE in [c.cell_contents for c in loader.__closure__]


def _take_over() -> None:
    """Make our names win whichever plugin comes first."""
    for name in CONNECTOR_NAMES:
        if name in KVConnectorFactory._registry and not _is_ours(name):
            del KVConnectorFactory._registry[name]
            logger.warning_once("kvpool: KVPOOL_TAKEOVER=1, %s of another plugin is replaced by kvpool's.", name)
        if name not in KVConnectorFactory._registry:
            KVConnectorFactory.register_connector(name, MODULE, name)
    original = KVConnectorFactory.register_connector
    if getattr(original, "kvpool_takeover", False):
        return

    def register_unless_ours(name: str, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        if name not in CONNECTOR_NAMES:
            original(name, *args, **kwargs)
            return
        logger.warning_once("kvpool: KVPOOL_TAKEOVER=1, a later registration of %s is ignored.", name)
        if name not in KVConnectorFactory._registry:  # a rival that removes the old entry first
            original(name, MODULE, name)

    register_unless_ours.kvpool_takeover = True  # type: ignore[attr-defined]
    KVConnectorFactory.register_connector = register_unless_ours  # type: ignore[method-assign]
