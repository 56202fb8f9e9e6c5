"""The command lines that start the services of stores, read like option files: `mooncake_master …` and `dscli start …`."""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Mapping
from typing import NamedTuple

from kvpool.options.errors import OptionError

SERVICES = ("mooncake_master", "dscli")


class Command(NamedTuple):
    """``service`` is the program; ``flags`` are its long flags without dashes, a flag without a value being "true";
    ``order`` has all flags, long and short, as they stood."""

    service: str
    flags: dict[str, str]
    order: list[str]


def parse_command(text: str, where: str, switches: Mapping[str, Collection[str]]) -> Command:
    """Split a command; ``switches`` names, by service, the flags that may stand without a value. OptionError for other programs."""
    joined = re.sub(r"\\\n", " ", text)
    try:
        words = shlex.split(joined, comments=True)
    except ValueError as error:
        raise OptionError(where, text, f"cannot be split into words: {error}") from None
    places = [index for index, word in enumerate(words) if word.rsplit("/", 1)[-1] in SERVICES]
    if not places:
        raise OptionError(where, text, f"expected a command of {' or '.join(SERVICES)}")
    service = words[places[0]].rsplit("/", 1)[-1]
    flags: dict[str, str] = {}
    order: list[str] = []
    rest = words[places[0] + 1 :]
    for index, word in enumerate(rest):
        if not re.match(r"--?[A-Za-z]", word):
            continue
        name, equals, value = word.lstrip("-").partition("=")
        order.append(name)
        following = rest[index + 1] if index + 1 < len(rest) else ""
        if equals:
            flags[name] = value
        elif name in switches.get(service, ()) and following.lower() not in ("true", "false", "0", "1"):
            flags[name] = "true"
        elif following and not re.match(r"--?[A-Za-z]", following):
            flags[name] = following
        else:
            flags[name] = "true"
    return Command(service, flags, order)
