"""Which releases of the MCP library are supported, and what is advised about the others."""

from __future__ import annotations

import pytest

from penstock.providers.mcp import McpTools, StdioServer, installed
from penstock.providers.mcp.installed import is_release_1, mcp_problem


def install(monkeypatch: pytest.MonkeyPatch, version: str | None) -> None:
    monkeypatch.setattr(installed, "VERSION", version)


@pytest.mark.parametrize(
    ("version", "is_1"),
    [("1.30.0", True), ("1.31", True), ("1.100.2", True), ("2.3.0", False), ("2.10.0", False), ("3.0.0rc1", False)],
)
def test_releases_1_and_2_are_supported(version: str, is_1: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, version)
    assert (mcp_problem(), is_release_1()) == (None, is_1)


@pytest.mark.parametrize("version", ["0.9.1", "1.9.4", "1.29.1", "2.0.1", "2.2.0", "unknown"])
async def test_a_version_that_is_too_old_is_named_with_what_to_do(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, version)
    problem = f"mcp {version} is installed, and is too old; 1.30 or newer, or 2.3 or newer, works"
    assert mcp_problem() == f"{problem}: pip install 'penstock[mcp]'"
    with pytest.raises(ModuleNotFoundError, match=problem):
        async with McpTools(StdioServer(["true"])):
            pass


async def test_without_the_library_opening_a_server_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, None)
    with pytest.raises(ModuleNotFoundError, match="not installed: pip install 'penstock\\[mcp\\]'"):
        async with McpTools(StdioServer(["true"])):
            pass
