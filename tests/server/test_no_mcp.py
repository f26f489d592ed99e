"""The server without a supported version of the MCP library."""

from __future__ import annotations

import subprocess
import sys

import pytest

from penstock.providers.mcp import installed
from penstock.providers.mcp.installed import mcp_problem
from penstock.server.serve import greeting
from penstock.server.settings import ServerSettings
from tests.server.served import CHAT, served

NOT_INSTALLED = "the library mcp is not installed: pip install 'penstock[mcp]'"


@pytest.fixture(params=[None, "1.9.4"])
def problem(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """No version of the library, or one that is too old; what that means for a server."""
    monkeypatch.setattr(installed, "VERSION", request.param)
    return str(mcp_problem())


async def test_a_server_without_the_library_says_what_mcp_needs_and_serves_the_rest(problem: str) -> None:
    async with served() as server, server.client("ann") as ann, server.client() as anonymous:
        await server.save("echo", CHAT)
        for method in ("POST", "GET", "DELETE"):
            answer = await ann.request(method, "/mcp", json={})
            assert (answer.status_code, answer.json()["error"]["code"]) == (501, "not_installed")
            assert answer.json()["error"]["message"] == problem
        assert (await anonymous.post("/mcp", json={})).status_code == 401
        question = {"model": "echo", "messages": [{"role": "user", "content": "hello"}]}
        answer = await ann.post("/v1/chat/completions", json=question)
        assert answer.status_code == 200
        assert answer.json()["choices"][0]["message"]["content"]


def test_the_greeting_of_a_server_without_the_library_says_how_to_install_it(problem: str) -> None:
    assert f"MCP  {problem}\n" in greeting(ServerSettings(), 8642, "memory:")


def test_the_greeting_has_the_address_of_the_mcp_endpoint() -> None:
    assert "MCP  http://127.0.0.1:8642/mcp" in greeting(ServerSettings(), 8642, "memory:")


WITHOUT_MCP = """
import sys
sys.modules["mcp"] = sys.modules["mcp_types"] = None
from penstock.providers.mcp import installed
installed.VERSION = None
import penstock.cli.service.gateway_command, penstock.cli.service.serve_command, penstock.cli.wrap.command
from penstock.cli import main
sys.exit(main(["mcp"]))
"""


def test_without_the_library_all_of_the_server_is_imported_and_penstock_mcp_says_what_it_needs() -> None:
    ended = subprocess.run([sys.executable, "-c", WITHOUT_MCP], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (64, f"penstock: {NOT_INSTALLED}\n")
