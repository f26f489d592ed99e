"""Names for runs and calls."""

from __future__ import annotations

import os
import time


def new_run_id() -> str:
    """A fresh run id: 48 bits of time, then 80 random bits, so that ids sort by their start."""
    return f"run-{time.time_ns() // 1_000_000:012x}{os.urandom(10).hex()}"


def call_id(number: int) -> str:
    """The public id of the run's `number`-th call: n000001, n000002, …; order is kept past n999999 by `call_number`."""
    return f"n{number:06d}"


def call_number(node_id: str) -> int:
    """The number behind a call id; KeyError if it is not one."""
    digits = node_id[1:]
    if node_id[:1] == "n" and 6 <= len(digits) <= 20 and digits.isascii() and digits.isdigit():
        number = int(digits)
        if call_id(number) == node_id:
            return number
    raise KeyError(f"{node_id!r} is not a call id (they look like n000001)")
