"""The version of the program."""

from __future__ import annotations

import sys


def version() -> str:
    """Return the text that `--version` prints."""
    # The package is loaded before this module; reading the installation's metadata would take many times as long.
    return f"penstock {sys.modules['penstock'].__version__}"
