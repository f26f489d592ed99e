"""A folder of this process in the user's cache, for the configuration of codex, which holds the key of the run.

A process that is killed cannot remove its folder. The next one does: each folder is locked by the process that owns it,
and a lock ends with its process.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

PREFIX = "penstock-exec-"


@contextmanager
def own_folder() -> Iterator[Path]:
    """Create a folder that is removed at the end; remove those of processes that were killed."""
    parent = _cache_folder()
    with ExitStack() as stack:
        with ExitStack() as alone:
            if parent is not None:
                with suppress(OSError):  # a file system without locks, whose leftovers stay
                    alone.enter_context(_locked(parent))  # until the new folder is locked too
                    _remove_leftovers(parent)
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix=PREFIX, dir=parent))
            with suppress(OSError):
                stack.enter_context(_locked(Path(folder)))
        yield Path(folder)


def _remove_leftovers(parent: Path) -> None:
    for folder in parent.glob(f"{PREFIX}*"):
        with suppress(OSError), _locked(folder, fcntl.LOCK_NB):
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _locked(folder: Path, flags: int = 0) -> Iterator[None]:
    """Lock the folder; OSError if `flags` says not to wait and another process has locked it."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | flags)
        yield
    finally:
        os.close(opened)


def _cache_folder() -> Path | None:
    """Return a folder for the helper programs of codex, which refuses to keep them below the temporary folder."""
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "penstock"
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # no home, or an unwritable one
        return None
    return folder if os.access(folder, os.W_OK) else None
