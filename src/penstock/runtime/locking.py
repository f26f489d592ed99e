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

Both are inside `try` because a signal handler may raise as soon as `acquire` has returned and just before `release`.
A handler may also raise while the thread still waits, or after the release, so `unlock` checks whether the thread has
the lock.
"""

from __future__ import annotations

import threading


def unlock(lock: threading.RLock) -> None:
    """Release the lock, if this thread has it."""
    if lock._is_owned():  # type: ignore[attr-defined]
        lock.release()
