"""Peers, each in an environment of its own.

An environment is made when it is first needed and kept under `.venv/peers`, or under PENSTOCK_BENCH_ENVS. A peer that
cannot be installed is reported as such; it never gets a number.
"""

from __future__ import annotations

import functools
import importlib
import os
import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENTS = Path(os.environ.get("PENSTOCK_BENCH_ENVS", ROOT / ".venv" / "peers"))
UV = ROOT / ".venv" / "bin" / "uv"

PEERS = {
    "veronica-core": "veronica-core==3.10.0",
    "tenacity": "tenacity==9.2.1",
    "pybreaker": "pybreaker==1.4.1",
    "langgraph": "langgraph==1.2.20",
    "pydantic-graph": "pydantic-graph==2.66.0",
    "burr": "burr==0.42.0",
    "hamilton": "sf-hamilton==1.90.0",
    "haystack": "haystack-ai==3.4.0",
    "llama-index-workflows": "llama-index-workflows==2.26.1",
    "agno": "agno==3.1.10",
    "langchain": "langchain==1.4.7",
    "pydantic-ai": "pydantic-ai-slim==2.66.0",
    "openai-agents": "openai-agents==0.24.0",
    "litellm": "litellm[proxy]==1.106.2",
    "agno-os": "agno[os,sqlite]==3.1.10",
    "adk": "google-adk==2.13.0",
    "langgraph-dev": "langgraph-cli[inmem]==0.4.40",
    "pydantic-ai-temporal": "pydantic-ai-slim[temporal]==2.66.0",
    "langgraph-postgres": "langgraph==1.2.20",
}
"""What is installed for each peer."""

BESIDE = {
    "pydantic-graph": ["logfire==5.2.0"],
    "burr": ["opentelemetry-sdk==1.45.2", "pydantic==2.14.3"],
    "langchain": ["langchain-core==1.7.2"],
    "adk": ["sqlalchemy==2.1.9", "aiosqlite==0.22.1", "greenlet==3.5.6"],
    "pydantic-ai-temporal": ["temporalio==1.35.0"],
    "langgraph-postgres": ["langgraph-checkpoint-postgres==3.2.0", "psycopg[binary,pool]==3.3.9"],
}
"""What a peer needs beside itself to be installed, to be traced or to do things at once."""


class NotInstalled(Exception):
    """The peer has no environment, and none could be made."""


@functools.cache
def python_of(peer: str | None) -> str:
    """The interpreter that has the peer; ours, for what needs none."""
    if peer is None:
        return sys.executable
    home = ENVIRONMENTS / peer
    python = home / "bin" / "python"
    specs = [PEERS[peer], *BESIDE.get(peer, [])]
    if not _has(python, specs):
        print(f"installing {PEERS[peer]} into {home.name} …", file=sys.stderr, flush=True)
        venv.create(home, with_pip=True)
        if not any(_succeeds(command) for command in _installers(python, specs)):
            raise NotInstalled(peer)
    return str(python)


def load(module: str) -> Any:
    """A module that only a peer's environment has."""
    return importlib.import_module(module)


def _has(python: Path, specs: Sequence[str]) -> bool:
    wanted = {name.partition("[")[0]: version for name, version in (spec.split("==") for spec in specs)}
    check = (
        f"from importlib.metadata import version; raise SystemExit({{n: version(n) for n in {[*wanted]}}} != {wanted})"
    )
    return python.exists() and _succeeds([str(python), "-c", check])


def _installers(python: Path, specs: Sequence[str]) -> list[list[str]]:
    """uv if the project has it, else pip; pip also stands in where only pip knows the way to a package index."""
    with_uv = [str(UV), "pip", "install", "--quiet", "--python", str(python), *specs]
    with_pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *specs]
    return [with_uv, with_pip] if UV.exists() else [with_pip]


def _succeeds(command: Sequence[str]) -> bool:
    return subprocess.run(command, capture_output=True, check=False).returncode == 0
