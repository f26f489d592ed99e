"""Ids of runs and calls, and the format of ids of runs, graphs and chats."""

from __future__ import annotations

import os
import re
import time
from functools import lru_cache

ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,99}")
"""The format of ids of runs, graphs and chats that come from outside."""
AN_ID = "a letter or digit, then up to 99 letters, digits or any of ._:-, all of them ASCII"
"""The format in words."""


def new_run_id() -> str:
    """Return a new run id: a UUID of version 7 that begins with the time in nanoseconds, so that ids sort by their
    start.
    """
    millisecond, rest = divmod(time.time_ns(), 1_000_000)
    chance = rest << 54 | int.from_bytes(os.urandom(7), "big") >> 2
    number = millisecond << 80 | 0x7 << 76 | chance >> 62 << 64 | 0b10 << 62 | chance & (1 << 62) - 1
    text = f"{number:032x}"
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"


@lru_cache(maxsize=4_096)
def call_id(number: int) -> str:
    """Return the id of the run's `number`-th call: n000001, n000002, …; `call_number` orders them also past n999999."""
    return f"n{number:06d}"


def call_number(node_id: str) -> int:
    """Return the number of a call id; raises KeyError for anything else."""
    digits = node_id[1:]
    if node_id[:1] == "n" and 6 <= len(digits) <= 20 and digits.isascii() and digits.isdigit():
        number = int(digits)
        if call_id(number) == node_id:
            return number
    raise KeyError(f"{node_id!r} is not a call id (they look like n000001)")
