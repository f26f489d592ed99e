"""Whether the long form of the tests runs: `make soak` sets PENSTOCK_SOAK."""

from __future__ import annotations

import os

SOAK = bool(os.environ.get("PENSTOCK_SOAK"))
