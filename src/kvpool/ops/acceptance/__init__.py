"""`kvpool acceptance`: conformance, exactness, faults and the kill list on this machine, in a quarter of an hour; one report."""

from __future__ import annotations

from kvpool.ops.acceptance.options import AcceptanceOptions, check
from kvpool.ops.acceptance.report import PARTS, Report
from kvpool.ops.acceptance.sequence import run

__all__ = ["PARTS", "AcceptanceOptions", "Report", "check", "run"]
