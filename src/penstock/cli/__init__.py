"""The command line: `penstock run …`, `penstock graph …`.

This module is what the installed command calls. It loads typer only when a command needs it, so that asking for the
version costs nothing and an installation without the `cli` extra can say what is missing.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress

NEEDED = {"typer", "rich"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command of the command line; its exit code."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    if given == ["--version"]:
        with suppress(OSError):  # what cannot be written is said by who knows how
            print(version(), flush=True)
            return 0
    try:
        from penstock.cli.app import invoke

        return invoke(given)
    except KeyboardInterrupt:
        return 130
    except ModuleNotFoundError as missing:
        if (missing.name or "").partition(".")[0] not in NEEDED:
            raise
    print("penstock: the command line needs typer and rich: pip install 'penstock[cli]'", file=sys.stderr)
    return 64


def version() -> str:
    """The version, as people ask for it."""
    # The package is loaded before this module is; asking the installation's metadata would take many times as long.
    return f"penstock {sys.modules['penstock'].__version__}"
