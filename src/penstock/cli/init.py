"""`penstock init`: a new project in an empty folder."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.exits import Exit, Refused, WriteFailed
from penstock.cli.render.screen import print_text

STARTER = {
    "README.md": "README.md",
    ".gitignore": "gitignore",
    "app.py": "app.py",
    "desk.py": "desk.py",
    "test_app.py": "test_app.py",
}
"""Files of a project, each with the resource that contains its text."""


def init(
    folder: Annotated[Path, typer.Argument(help="Folder of the project; made if it does not exist.")] = Path(),
) -> int:
    """Write a small project to start from: a graph, an agent with an approval, and a test of their budget.

    A folder that has files in it is refused.

    \b
    Examples:
      penstock init briefings
      cd briefings && penstock serve app.py desk.py

    \b
    Exit codes:
      0 written   2 a file cannot be written   64 the folder is not empty
    """
    written = ", ".join(STARTER)
    try:
        found = _first_file(folder)
        if found is not None:
            raise Refused(
                f"{folder} is not empty (it has {found}); name an empty or a new folder: init would write {written}"
            )
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in _files():
            (folder / name).write_text(text, "utf-8")
    except OSError as error:
        raise WriteFailed(f"cannot write {error.filename or folder}: {error.strerror or error}") from error
    print_text(f"wrote {written}")
    print_text("next:")
    if folder != Path():
        print_text(f"  cd {folder}")
    print_text("  penstock run app.py --input dams --max-cost 0.01")
    print_text("  penstock serve app.py desk.py")
    return Exit.OK


def _first_file(folder: Path) -> str | None:
    if not folder.exists():
        return None
    if not folder.is_dir():
        raise Refused(f"{folder} is a file; name a folder")
    return min((path.name for path in folder.iterdir()), default=None)


def _files() -> Iterator[tuple[str, str]]:
    starter = files("penstock.cli") / "starter"
    for name, resource in STARTER.items():
        yield name, starter.joinpath(resource).read_text("utf-8")
