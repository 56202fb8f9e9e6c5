"""``python -m tests.ascend_stand_in COMMAND...``: run a command where the stand-in takes the driver's place."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.ascend_stand_in.build import build
from tests.ascend_stand_in.namespace import run
from tests.ascend_stand_in.refuse import refusal


def main(command: list[str]) -> int:
    if not command:
        print("usage: python -m tests.ascend_stand_in COMMAND [ARGUMENT...]", file=sys.stderr)
        return 2
    try:
        reason = refusal()
        if reason is not None:
            raise OSError(reason)
        home = build()
        room = Path(tempfile.gettempdir()) / "kvpool-stand-in-room"
        room.mkdir(exist_ok=True)  # stays empty: what is mounted on it is seen by the command only
        run(command, home, room)
    except OSError as error:
        print(f"ascend stand-in: {error}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
