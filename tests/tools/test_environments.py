"""Environments of other people's packages."""

from __future__ import annotations

from tools.environments import requirements


def test_all_extras_are_required_beside_a_framework() -> None:
    found = requirements("all")
    for name in ("pydantic", "mcp", "openai", "anthropic", "typer", "fastapi", "asyncpg", "temporalio"):
        assert sum(requirement.startswith(name) for requirement in found) == 1, name
    assert not any(requirement.startswith("penstock") for requirement in found)
