"""Environments of other people's packages, made on first use, and programs that run in them without a network."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
MAX_INSTALL_S = 900
NESTED = re.compile(r"penstock\[([a-z,]+)\]")
"""A requirement of an extra that stands for other extras."""
QUIET = {
    "AGNO_TELEMETRY": "false",
    "ANONYMIZED_TELEMETRY": "false",
    "CREWAI_DISABLE_TELEMETRY": "true",
    "CREWAI_TRACING_ENABLED": "false",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "LANGSMITH_TRACING": "false",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
    "OTEL_SDK_DISABLED": "true",
}
"""Switches off what the frameworks report to their makers."""


class NotInstalled(Exception):
    """The packages of an environment could not be installed."""


def environment(folder: Path, packages: Sequence[str]) -> Path:
    """Return the interpreter of the environment; make it if its packages are not those that it was made for."""
    python, stamp = folder / "bin" / "python", folder / "packages.txt"
    if stamp.exists() and stamp.read_text().splitlines() == list(packages):
        return python
    uv = shutil.which("uv", path=str(Path(sys.executable).parent)) or "uv"
    for command in (
        [uv, "venv", "--quiet", "--clear", "--python", sys.executable, str(folder)],
        [uv, "pip", "install", "--quiet", "--python", str(python), *packages],
    ):
        try:
            subprocess.run(["nice", *command], check=True, capture_output=True, text=True, timeout=MAX_INSTALL_S)
        except subprocess.SubprocessError as error:
            raise NotInstalled(last_line(getattr(error, "stderr", None) or str(error))) from error
    stamp.write_text("\n".join(packages))
    return python


def requirements(extra: str) -> list[str]:
    """Return what an extra of Penstock requires, and what Penstock itself does."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found: list[str] = list(project["dependencies"])
    for requirement in project["optional-dependencies"][extra]:
        nested = NESTED.fullmatch(requirement)
        if nested is None:
            found.append(requirement)
        for other in nested[1].split(",") if nested is not None else ():
            found += requirements(other)
    return list(dict.fromkeys(found))


def isolation() -> list[str]:
    """Return the command that runs another one with a loopback interface and no other; empty if it cannot be had."""
    prefix = ["unshare", "--map-root-user", "--net", "sh", "-c", 'ip link set lo up && exec nice "$@"', "sh"]
    try:
        subprocess.run([*prefix, "true"], check=True, capture_output=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        print("warning: no network namespace here; telemetry is switched off by environment variables alone")
        return []
    return prefix


def variables(home: Path, **more: str) -> dict[str, str]:
    """Return the environment variables of a program: no key, no telemetry, and a home of its own."""
    home.mkdir(parents=True, exist_ok=True)
    kept = {key: value for key in ("PATH", "LANG", "TMPDIR") if (value := os.environ.get(key)) is not None}
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    return {**kept, **QUIET, "HOME": str(home), "PYTHONPATH": paths, "OPENAI_API_KEY": "none", **more}


def last_line(text: str) -> str:
    """Return the last line of an output that says anything."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:200] if lines else "no output"
