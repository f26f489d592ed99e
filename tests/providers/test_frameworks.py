"""Whole frameworks under a run's limits, unchanged: each in an environment of its own, judged by the invoice."""

from __future__ import annotations

import ast
import os
import subprocess
from pathlib import Path

import pytest

from benchmarks import _peers as peers
from penstock.testing.provider import FakeProviderServer
from tests.soak import SOAK

PROGRAMS = Path(__file__).parent / "peers"
SOURCE = Path(__file__).parents[2] / "src"

ENVIRONMENTS = {
    "langgraph-clients": ["langgraph==1.2.20", "langchain-openai==1.7.3", "langchain-anthropic==1.7.7"],
    "pydantic-ai-clients": ["pydantic-ai-slim==2.66.0", "openai==3.49.0", "anthropic==2.8.0", "tiktoken==0.14.0"],
    "openai-agents": ["openai-agents==0.24.0"],
    "aiohttp-clients": ["openai==3.49.0", "anthropic==2.8.0", "aiohttp==3.14.5"],
}

LONG = pytest.mark.skipif(not SOAK, reason="the long form, with PENSTOCK_SOAK")


def python_of(name: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """An interpreter that has the framework; the test is skipped if none can be made."""
    first, *others = ENVIRONMENTS[name]
    monkeypatch.setitem(peers.PEERS, name, first)
    monkeypatch.setitem(peers.BESIDE, name, others)
    try:
        return peers.python_of(name)
    except peers.NotInstalled:
        pytest.skip(f"{', '.join(ENVIRONMENTS[name])}: could not be installed from the package index")


@pytest.mark.requirement("X-5")
@pytest.mark.reliability
@pytest.mark.parametrize(
    ("environment", "program", "api"),
    [
        ("langgraph-clients", "langgraph_fan_out.py", "openai"),
        pytest.param("langgraph-clients", "langgraph_fan_out.py", "anthropic", marks=LONG),
        ("pydantic-ai-clients", "pydantic_ai_agents.py", "openai"),
        pytest.param("pydantic-ai-clients", "pydantic_ai_agents.py", "anthropic", marks=LONG),
        ("openai-agents", "openai_agents.py", "openai"),
        ("aiohttp-clients", "over_aiohttp.py", "openai"),
    ],
)
def test_sixteen_at_once_spend_no_more_than_the_ceiling(
    environment: str, program: str, api: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = python_of(environment, monkeypatch)
    with FakeProviderServer.flat(0.50) as server:
        command = [python, str(PROGRAMS / program), server.url, api]
        around = {**os.environ, "PYTHONPATH": str(SOURCE)}
        done = subprocess.run(command, capture_output=True, text=True, env=around, check=False)
        assert done.returncode == 0, done.stderr
        rounds = [ast.literal_eval(line) for line in done.stdout.splitlines()]
        assert len(rounds) >= 2
        for errors, charged_usd in rounds:
            # A framework may cancel what it had begun when one of its branches fails; that is charged all the same.
            assert errors.keys() == {"BudgetExceededError"}
            assert charged_usd == 1.00
        assert 0.50 * len(rounds) <= server.invoice.total_usd <= 1.00 * len(rounds)


@LONG
@pytest.mark.requirement("X-5")
@pytest.mark.reliability
def test_the_example_holds_its_ceiling(monkeypatch: pytest.MonkeyPatch) -> None:
    python = python_of("langgraph-clients", monkeypatch)
    around = {**os.environ, "PYTHONPATH": str(SOURCE)}
    example = SOURCE.parent / "examples" / "contained_langgraph.py"
    done = subprocess.run([python, str(example)], capture_output=True, text=True, env=around, check=False)
    assert done.returncode == 0, done.stderr
    assert "stopped: " in done.stdout
