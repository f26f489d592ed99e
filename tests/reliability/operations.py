"""Counts work in a way that a busy machine does not change."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any


@dataclass(slots=True)
class Counted:
    """What a block of code has executed."""

    instructions: int = 0


@contextmanager
def counting() -> Iterator[Counted]:
    """Count the bytecode instructions of every function that this thread calls or resumes inside the block."""
    counted = Counted()

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        frame.f_trace_opcodes = True
        if event == "opcode":
            counted.instructions += 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield counted
    finally:
        sys.settrace(before)


def operations(work: Callable[[], object]) -> int:
    """How many bytecode instructions `work` executes."""
    with counting() as counted:
        work()
    return counted.instructions
