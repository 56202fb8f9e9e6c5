"""Logs as one JSON object a line. What clients and engines have said stays out: no prompts, no answers, no error bodies."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime

logger = logging.getLogger("kvpool.proxy")


class _Lines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line = {"time": time, "level": record.levelname.lower(), "event": record.getMessage(), **getattr(record, "fields", {})}
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def set_up(level: str) -> None:
    """To standard error; what libraries and the channel to prefill say only from WARNING on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Lines())
    others = ("kvpool.transfer", "uvicorn", "asyncio", "aiohttp")
    for name, lowest in (("kvpool.proxy", level.upper()), *((other, "WARNING") for other in others)):
        one = logging.getLogger(name)
        one.handlers, one.propagate = [handler], False
        one.setLevel(lowest)


def say(event: str, level: int = logging.INFO, **fields: object) -> None:
    logger.log(level, event, extra={"fields": fields})
