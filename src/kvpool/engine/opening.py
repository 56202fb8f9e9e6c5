"""The store of an engine: built from its options, opened once per role and process."""

from __future__ import annotations

import os
from pathlib import PurePosixPath

from vllm.logger import init_logger

from kvpool.engine.setup import EngineSetup
from kvpool.options import AscendStoreOptions
from kvpool.stores import DiskSettings, build_store
from kvpool.stores.base import Store
from kvpool.stores.context import Role, StoreContext, device_kind

logger = init_logger("vllm.kvpool")


def open_store(setup: EngineSetup, role: Role, device: str, device_id: int = 0, rank: int = 0) -> Store:
    """The store of the chosen backend, open. ValueError or OSError in one line."""
    options = setup.options
    os.environ.update(setup.env_updates)
    if options.backend == "local":
        store = build_store(
            "local",
            root=options.local_pool_root,
            name=options.local_pool_name,
            dram_bytes=options.local_dram_size,
            on_last_close=options.local_on_last_close,
            device=device,
            disk=disk_settings(options),
            fault_plan_path=options.fault_plan_path,
        )
    else:
        file = setup.backend_file
        assert file is not None, "every store but local has a configuration"
        store = build_store(
            file.backend,
            config=file.options,
            conf_path=file.path,
            context=StoreContext(
                role, device_kind(device), device_id, rank, setup.world_size, setup.options.load_timeout_ms / 1000
            ),
            fault_plan_path=options.fault_plan_path,
        )
    store.open()
    return store


def disk_settings(options: AscendStoreOptions) -> DiskSettings | None:
    """The disk tier of the local store; None where it is off."""
    if not options.enable_ssd_offload or options.ssd_offload_path is None or options.local_ssd_size is None:
        return None
    return DiskSettings(
        folder=str(PurePosixPath(options.ssd_offload_path)),
        nbytes=options.local_ssd_size,
        dram_high=options.local_dram_high_watermark,
        dram_low=options.local_dram_low_watermark,
        high=options.local_ssd_high_watermark,
        low=options.local_ssd_low_watermark,
        admission=options.local_ssd_admission,
    )


def pool_address(setup: EngineSetup) -> str:
    """Where the pool is, for the log."""
    if setup.backend_file is not None:
        return setup.record.endpoint or setup.backend_file.path
    from kvpool.stores.local.pool_dir import default_root

    return f"{setup.options.local_pool_root or default_root()}/{setup.options.local_pool_name}"


def store_line(setup: EngineSetup) -> str:
    """Which pool this engine uses, and why that one."""
    options = setup.options
    return (
        f"backend {options.backend}: {options.backend_reason}; address {pool_address(setup)}, "
        f"tenant {setup.record.tenant or 'default'}"
    )


def announce(store: Store, setup: EngineSetup, loads: str) -> None:
    """Tell the log in one line what this engine uses. Asks the store: not for the engine's thread."""
    capacity = store.stats().capacity_bytes
    logger.info(
        "kvpool: all ranks have met: %s, capacity %s, policy %s, %s loads; the namespace is made at the first request, when vLLM "
        "knows its hash seed",
        store_line(setup),
        f"{capacity} bytes" if capacity else "not told by the store",
        setup.policy,
        loads,
    )
