"""What is parsed and validated today but runs only in a later version. To make something available, delete its line here."""

from __future__ import annotations

from kvpool.options.errors import NotAvailableError
from kvpool.options.probe import Device

NOT_YET = frozenset(
    {
        "use_layerwise",
        "sparse_kv_offload_config",
        "SfaRemoteD2HConnector",
    }
)
ENGINE_DEVICES: tuple[Device, ...] = ("cpu",)
"""Where an engine of this version can run."""


def refuse_unavailable(feature: str, key: str, value: object, where: str = "") -> None:
    """NotAvailableError if ``feature``, which ``key`` switches on, is still to come."""
    if feature in NOT_YET:
        raise NotAvailableError(key, value, "is not available yet", where=where)
