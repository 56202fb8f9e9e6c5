"""The policy file of a strict Mooncake master, as far as we read it: which tenants it registers."""

from __future__ import annotations

import re

_NAME = re.compile(r"""^\s*(?:-\s*)?name\s*:\s*(?:"(?P<double>[^"]*)"|'(?P<single>[^']*)'|(?P<bare>[^#'"][^#]*?))\s*(?:\#.*)?$""")


def policy_tenants(text: str) -> set[str]:
    """The names in the list ``tenants`` of the YAML text, in block style as the guides write it."""
    found = set()
    for line in text.splitlines():
        if match := _NAME.match(line):
            found.add(next(name for name in match.groups() if name is not None).strip())
    return found
