"""`penstock init`: what it writes works, and nothing that exists is touched."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from penstock.cli import init
from tests.cli.conftest import Penstock


def test_the_project_runs_and_passes_its_own_tests(penstock: Penstock, directory: Path) -> None:
    ended = penstock("init", "new/briefings")
    assert (ended.code, ended.err) == (0, "")
    assert ended.out.splitlines()[0] == "wrote README.md, .gitignore, app.py, desk.py, test_app.py"
    project = directory / "new" / "briefings"
    assert sorted(path.name for path in project.iterdir()) == sorted(init.STARTER)
    tested = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        cwd=project,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert tested.returncode == 0, tested.stdout + tested.stderr
    assert "2 passed" in tested.stdout


def test_an_empty_folder_is_used_as_it_is(penstock: Penstock, directory: Path) -> None:
    assert penstock("init").code == 0
    assert (directory / "app.py").exists()


def test_a_folder_with_files_is_refused_and_left_alone(penstock: Penstock, directory: Path) -> None:
    (directory / "app.py").write_text("mine")
    ended = penstock("init", ".")
    assert ended.code == 64
    assert ended.err == (
        "penstock: . is not empty (it has app.py); name an empty or a new folder: "
        "init would write README.md, .gitignore, app.py, desk.py, test_app.py\n"
    )
    assert [path.name for path in directory.iterdir()] == ["app.py"]
    assert (directory / "app.py").read_text() == "mine"


def test_a_file_in_the_place_of_the_folder_is_named(penstock: Penstock, directory: Path) -> None:
    (directory / "taken").write_text("")
    assert penstock("init", "taken").err == "penstock: taken is a file; name a folder\n"


def test_a_folder_that_cannot_be_made_is_named(penstock: Penstock, directory: Path) -> None:
    (directory / "taken").write_text("")
    ended = penstock("init", "taken/project")
    assert ended.code == 2
    assert ended.err == "penstock: cannot write taken/project: Not a directory\n"


@pytest.mark.parametrize("name", ["ä ö", "a'b", "-dashed"])
def test_any_name_of_a_folder_works(penstock: Penstock, directory: Path, name: str) -> None:
    assert penstock("init", "--", name).code == 0
    assert (directory / name / "app.py").exists()
