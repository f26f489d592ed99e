"""Which release of the MCP library is installed; the library is not imported.

Releases 1 and 2 are supported, because some agent frameworks need release 1. Older releases of each lack what the
limits need: 1.30 is the first that ends idle sessions without ending a call in one, 2.3 the first that lets a server
and a client limit what they hold.
"""

from __future__ import annotations

import re
from importlib import metadata

NUMBERS = re.compile(r"(\d+)(?:\.(\d+))?")
OLDEST_1 = (1, 30)
OLDEST_2 = (2, 3)


def _installed() -> str | None:
    try:
        return metadata.version("mcp")
    except metadata.PackageNotFoundError:
        return None


VERSION = _installed()
"""None without the library; found out when this is imported, because that reads files."""


def is_release_1() -> bool:
    """Whether the installed library is of release 1."""
    return VERSION is not None and VERSION.startswith("1.")


def mcp_problem() -> str | None:
    """Return why MCP cannot be used in this environment, and what to do; None if it can."""
    if VERSION is None:
        return "the library mcp is not installed: pip install 'penstock[mcp]'"
    found = NUMBERS.match(VERSION)
    numbers = (int(found[1]), int(found[2] or 0)) if found else (0, 0)
    if OLDEST_1 <= numbers < (2, 0) or numbers >= OLDEST_2:
        return None
    too_old = f"mcp {VERSION} is installed, and is too old; 1.30 or newer, or 2.3 or newer, works"
    return f"{too_old}: pip install 'penstock[mcp]'"
