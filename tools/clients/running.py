"""The programs of `programs/`, each in an environment of its own below build/clients/, made on first use."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from tools.environments import MAX_INSTALL_S, ROOT, NotInstalled, environment

HERE = Path(__file__).parent
BUILD = ROOT / "build" / "clients"
PROGRAMS = HERE / "programs"
MAX_PROGRAM_S = 120


def command_of(name: str, packages: tuple[str, ...]) -> list[str] | None:
    """Make the environment of a program if it is not there; return the command that runs it, None if that failed."""
    try:
        if (PROGRAMS / f"{name}.sh").exists():
            return ["sh", str(PROGRAMS / f"{name}.sh")]
        return _node(name, packages) if (PROGRAMS / f"{name}.mjs").exists() else _python(name, packages)
    except (OSError, subprocess.SubprocessError, NotInstalled) as error:
        print(f"{name}: not run: {getattr(error, 'stderr', None) or error}")
        return None


def versions(name: str, packages: tuple[str, ...]) -> str:
    """Return the packages of a program with the versions that are installed in its environment."""
    folder = BUILD / name
    if not packages:
        return _run([name.rpartition("/")[2], "--version"]).split("(")[0].strip()
    if (folder / "node_modules").exists():
        manifests = [json.loads((folder / "node_modules" / one / "package.json").read_text()) for one in packages]
        return "npm: " + ", ".join(f"{manifest['name']} {manifest['version']}" for manifest in manifests)
    names = [re.split(r"[\[<>=]", one)[0] for one in packages]
    look = "import sys, importlib.metadata as m; print(*[m.version(name) for name in sys.argv[1:]])"
    found = _run([str(folder / "bin" / "python"), "-c", look, *names]).split()
    return "Python: " + ", ".join(f"{one} {version}" for one, version in zip(names, found, strict=True))


def run_program(name: str, command: list[str], env: Mapping[str, str]) -> str | None:
    """Run a program and show what it prints; return that, None if it failed."""
    kept = {key: value for key in ("PATH", "LANG", "TMPDIR", "HOME") if (value := os.environ.get(key)) is not None}
    try:
        ended = subprocess.run(
            command,
            env={**kept, "NO_PROXY": "*", **env},
            capture_output=True,
            text=True,
            timeout=MAX_PROGRAM_S,
            check=False,
        )
    except (OSError, subprocess.SubprocessError) as error:
        print(f"{name}: not run: {error}")
        return None
    for line in ended.stdout.splitlines():
        print(f"{name}: {line}")
    if ended.returncode:
        print(f"{name}: failed:\n{ended.stderr[-2_000:]}")
        return None
    return ended.stdout


def _python(name: str, packages: tuple[str, ...]) -> list[str]:
    python = environment(BUILD / name, packages)
    return [str(python), "-P", str(PROGRAMS / f"{name}.py")]  # -P: programs have the names of packages


def _node(name: str, packages: tuple[str, ...]) -> list[str]:
    folder = node_packages(name, packages)
    shutil.copy(PROGRAMS / f"{name}.mjs", folder / "program.mjs")  # packages are found beside the program
    return ["node", str(folder / "program.mjs")]


def node_packages(name: str, packages: tuple[str, ...]) -> Path:
    """Install packages of npm if they are not there; return the folder whose programs find them."""
    folder = BUILD / name
    stamp = folder / "packages.txt"
    if not stamp.exists() or tuple(stamp.read_text().split()) != packages:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "package.json").write_text('{"private": true, "type": "module"}')
        _run(["npm", "install", "--silent", "--no-fund", "--no-audit", *packages], folder)
        stamp.write_text("\n".join(packages))
    return folder


def _run(command: list[str], folder: Path | None = None) -> str:
    ended = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True, timeout=MAX_INSTALL_S)
    return ended.stdout
