"""The command lines that start the services of stores, read like option files: `mooncake_master …` and `dscli start …`."""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from kvpool.options.errors import OptionError

SERVICES = ("mooncake_master", "dscli")
_FLAG = re.compile(r"--?[A-Za-z]")


@dataclass(slots=True)
class Command:
    """``service`` is the program, ``flags`` its flags without dashes; one without a value is "true".

    ``order`` has the flags as they stood, ``joined`` those with ``=``, ``loose`` the word after a switch that takes none."""

    service: str
    flags: dict[str, str] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)
    joined: list[str] = field(default_factory=list)
    loose: dict[str, str] = field(default_factory=dict)


def parse_command(text: str, where: str, switches: Mapping[str, Collection[str]]) -> Command:
    """Split a command; ``switches`` names, by service, the flags that never take the next word as their value.

    OptionError for other programs."""
    try:
        words = shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise OptionError(where, text, f"cannot be split into words: {error}") from None
    names = [word.rsplit("/", 1)[-1] for word in words]
    places = [index for index, name in enumerate(names) if name in SERVICES]
    if not places:
        raise OptionError(where, text, f"expected a command of {' or '.join(SERVICES)}")
    command = Command(names[places[0]])
    rest = words[places[0] + 1 :]
    for word, following in zip(rest, [*rest[1:], ""]):
        if _FLAG.match(word):
            _add(command, word, following, switches.get(command.service, ()))
    return command


def _add(command: Command, word: str, following: str, switches: Collection[str]) -> None:
    name, equals, value = word.lstrip("-").partition("=")
    command.order.append(name)
    stands_alone = not following or _FLAG.match(following) is not None
    if equals:
        command.joined.append(name)
        command.flags[name] = value
    elif name in switches or stands_alone:
        command.flags[name] = "true"
        if not stands_alone:
            command.loose[name] = following
    else:
        command.flags[name] = following
