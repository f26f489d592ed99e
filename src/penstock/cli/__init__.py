"""The command line: `penstock run …`, `penstock graph …`.

This module is the entry point of the installed command. It loads typer only when a command needs it, so that
`--version` is fast and an installation without the `cli` extra can report what is missing.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress

NEEDED = {"typer", "rich"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    if words == ["--version"]:
        from penstock.cli.version import version

        with suppress(OSError):  # fall through: `invoke` reports failures to write
            print(version(), flush=True)
            return 0
    try:
        from penstock.cli.app import invoke

        return invoke(words)
    except KeyboardInterrupt:
        return 130
    except ModuleNotFoundError as missing:
        if (missing.name or "").partition(".")[0] not in NEEDED:
            raise
    print("penstock: the command line needs typer and rich: pip install 'penstock[cli]'", file=sys.stderr)
    return 64
