"""The exported table of prices, kept in the user's cache directory, so that only the first process makes it.

Reading it takes milliseconds, making it up to seconds, for which a sync call on an event loop would block the loop.

The first line identifies the sources of the table: the files of genai-prices and of its export, with their sizes and
times, as for bytecode. A file with other sources, a truncated one, or one that other users can write is not used. Every
failure counts as a missing table; nothing depends on it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

EXPORTING = ("price_export.py", "price_table.py", "price_cache.py", "rates.py", "usage.py")
"""The files of this folder on which the table depends."""
OTHERS_MAY_WRITE = 0o022


class Cache:
    """The table file for the installed versions of genai-prices and of its export."""

    def __init__(self, path: Path, made_from: bytes) -> None:
        self.path = path
        self.made_from = made_from
        """The first line of the file."""

    @classmethod
    def find(cls) -> Cache | None:
        """The cache of this environment; None without a cache directory, or if the sources are not files."""
        try:
            found = find_spec("genai_prices")
            if found is None or found.origin is None:
                return None
            prices, here = Path(found.origin).parent, Path(__file__).parent
            sources = [*sorted(prices.glob("*.py")), *(here / name for name in EXPORTING)]
            stats = [(str(one), one.stat()) for one in sources]
            made_from = json.dumps(["made from", [(one, stat.st_size, stat.st_mtime_ns) for one, stat in stats]])
            name = hashlib.sha256(f"{prices}\n{here}".encode()).hexdigest()[:16]
            return cls(_directory() / f"prices-{name}.jsonl", made_from.encode())
        except (ImportError, OSError, RuntimeError, ValueError):
            return None

    def read(self) -> Sequence[bytes] | None:
        """Return the lines of the table; None without a usable table."""
        try:
            with self.path.open("rb") as file:
                if not _is_trusted(os.fstat(file.fileno())):
                    return None
                made_from, *lines = file.read().splitlines()
        except (OSError, ValueError):
            return None
        return lines if made_from == self.made_from else None

    def write(self, lines: Sequence[str]) -> None:
        """Write the table; does nothing where that is impossible."""
        content = b"\n".join([self.made_from, *(line.encode() for line in lines)])
        unfinished = self.path.with_suffix(f".{os.getpid()}")
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with open(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(content)
            unfinished.replace(self.path)  # atomic: another process reads the old table or the new one
        except OSError:
            with contextlib.suppress(OSError):
                unfinished.unlink()


def _directory() -> Path:
    given = os.environ.get("LOCALAPPDATA" if sys.platform == "win32" else "XDG_CACHE_HOME", "")
    return (Path(given) if Path(given).is_absolute() else Path.home() / ".cache") / "penstock"


def _is_trusted(stat: os.stat_result) -> bool:
    """Whether only this user, or root, may have written the file: prices decide what limits allow."""
    if sys.platform == "win32":
        return True
    return stat.st_uid in (0, os.geteuid()) and not stat.st_mode & OTHERS_MAY_WRITE
