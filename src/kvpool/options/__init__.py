"""Typed configuration: everything is parsed strictly and validated before anything starts."""

from __future__ import annotations

from kvpool.options.ascend_store import AscendStoreOptions
from kvpool.options.deployment import Deployment
from kvpool.options.errors import NotAvailableError, OptionError
from kvpool.options.load import Loaded, load_ascend_store
from kvpool.options.transfer import ParsedConnector, ParsedTransfer, check_children, parse_transfer_config

__all__ = [
    "AscendStoreOptions",
    "Deployment",
    "Loaded",
    "NotAvailableError",
    "OptionError",
    "ParsedConnector",
    "ParsedTransfer",
    "check_children",
    "load_ascend_store",
    "parse_transfer_config",
]
