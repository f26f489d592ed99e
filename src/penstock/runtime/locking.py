"""Acquire the run's lock cheaply, on the path of every call.

`with lock:` looks up two methods and binds both, which costs more than an uncontended lock itself. The two places that
every call passes through do the same at half the cost:

    try:
        lock.acquire()
        ...
        lock.release()
    except BaseException:
        unlock(lock)
        raise

Both are inside `try` because a signal handler may raise as soon as `acquire` has returned and just before `release`. A
handler may also raise while the thread still waits, or after the release, so `unlock` checks whether the thread has the
lock.

Rare changes use `all_or_nothing`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from penstock.errors import LedgerError


def unlock(lock: threading.RLock) -> None:
    """Release the lock, if this thread has it."""
    if lock._is_owned():  # type: ignore[attr-defined]
        lock.release()


def all_or_nothing(lock: threading.RLock, change: Callable[[], None], report: Callable[[], None] | None = None) -> None:
    """Call `change` with the lock; if a signal handler raises in the middle, call it again before the error passes.

    So `change` must skip the parts that it has already done. It refuses with a LedgerError, and then has changed
    nothing. `report` follows without the lock, interrupted or not. It may be called twice, and also if nothing was
    changed.
    """
    try:
        lock.acquire()
        change()
        lock.release()
        if report is not None:
            report()
    except LedgerError:
        unlock(lock)
        raise
    except BaseException:
        try:
            if lock._is_owned():  # type: ignore[attr-defined]
                change()
        finally:
            unlock(lock)
        if report is not None:
            report()
        raise
