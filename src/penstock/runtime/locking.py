"""The run's lock, where every call takes it.

`with lock:` looks two methods up and makes objects of both, which takes longer than all else about a lock that nobody
else wants. In the two places that every call passes through, this does the same for half of it:

    try:
        lock.acquire()
        ...
    except BaseException:
        unlock(lock)
        raise
    lock.release()

`acquire` stands inside of `try`, because a signal handler may raise as soon as it has returned; and because one may
raise while this thread still waits, `unlock` looks whether there is anything to give back. Nothing can strike between
the last line of the block and `release`.
"""

from __future__ import annotations

import threading


def unlock(lock: threading.RLock) -> None:
    """Give the lock back, if this thread has it."""
    if lock._is_owned():  # type: ignore[attr-defined]
        lock.release()
