"""What is installed: a wheel carries the built UI and the licences of what it contains."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
UI = "penstock/server/ui/"


def test_a_wheel_carries_the_ui_and_its_licences(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = [name.removeprefix(UI) for name in archive.namelist() if name.startswith(UI)]
        licences = archive.read(f"{UI}licenses.md").decode()
    assert {"index.html", "licenses.md"} <= set(names)
    assert {Path(name).suffix for name in names if name.startswith("assets/")} == {".js", ".css", ".svg"}
    assert all(f"## {package}" in licences for package in ("react", "react-dom", "scheduler"))
