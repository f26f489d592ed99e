"""How much the long tests do: a share in `make test`, all of it in `make soak`, which sets PENSTOCK_SOAK."""

from __future__ import annotations

import os

SOAK = bool(os.environ.get("PENSTOCK_SOAK"))


def scaled(usual: int, *, soak: int) -> int:
    """How many schedules, examples, calls or rounds: `usual`, or as many as a soak has."""
    return soak if SOAK else usual
