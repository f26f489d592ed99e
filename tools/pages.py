"""Parts of documentation pages that are written by programs: between two comments that name the program."""

from __future__ import annotations

from pathlib import Path


def write_part(page: Path, name: str, text: str) -> None:
    """Replace what is between the comments of this name."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, found, rest = page.read_text().partition(begin)
    _, ended, after = rest.partition(end)
    if not found or not ended:
        raise ValueError(f"{page} has no part between {begin} and {end}")
    page.write_text(f"{before}{begin}\n{text}\n{end}{after}")
