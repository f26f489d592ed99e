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


def installed_version() -> str | None:
    """Return the version of the installed library; None if there is none."""
    try:
        return metadata.version("mcp")
    except metadata.PackageNotFoundError:
        return None


def is_release_1() -> bool:
    """Whether the installed library is of release 1."""
    return (installed_version() or "").startswith("1.")


def mcp_problem() -> str | None:
    """Return why MCP cannot be used in this environment, and what to do; None if it can."""
    version = installed_version()
    if version is None:
        return "MCP needs the library mcp, which is not installed here: pip install 'penstock[mcp]'"
    found = NUMBERS.match(version)
    numbers = (int(found[1]), int(found[2] or 0)) if found else (0, 0)
    if OLDEST_1 <= numbers < (2, 0) or numbers >= OLDEST_2:
        return None
    return f"MCP needs mcp 1.30 or newer, or mcp 2.3 or newer; {version} is installed here: pip install 'penstock[mcp]'"
