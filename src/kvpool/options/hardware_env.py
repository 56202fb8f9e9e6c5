"""Variables that a series of NPUs needs, whichever store moves its memory."""

from __future__ import annotations

from collections.abc import Mapping

from kvpool.options.deployment import Deployment
from kvpool.options.environment import RESOURCE_CONFIG

INTRA_ROCE = "HCCL_INTRA_ROCE_ENABLE"
LOCAL_RESOURCES = "ASCEND_LOCAL_COMM_RES"


def hardware_warnings(env: Mapping[str, str], deployment: Deployment) -> list[str]:
    """A line for each variable without which transfers of this series fail; nothing where the series is not known."""
    if deployment.hardware == "A2" and env.get(INTRA_ROCE) != "1":
        return [f"{INTRA_ROCE} is not 1: transfers between NPUs of the A2 series need it"]
    if deployment.hardware == "A5" and not env.get(RESOURCE_CONFIG) and not env.get(LOCAL_RESOURCES):
        return [f"neither {RESOURCE_CONFIG} (UBOE) nor {LOCAL_RESOURCES} (UB) is set: the A5 series needs one of them"]
    return []
