"""Checks of an installation: versions, extras, node types, keys of providers and the price table.

For `penstock doctor`, and for admins of a running server. Changes nothing; shows whether a key is set, never its value.
"""

from __future__ import annotations

import os
import sqlite3
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Literal

from penstock.errors import PenstockError
from penstock.kernel.executor import ExecutorRegistry
from penstock.providers.mcp.installed import mcp_problem

if TYPE_CHECKING:
    from penstock.runtime.billing.prices import PriceBook

State = Literal["ok", "missing", "broken"]

MIN_SQLITE = (3, 35)
"""First version with RETURNING."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    name: str
    state: State
    """`missing` is optional; `broken` cannot work as it is."""
    found: str
    advice: str = ""


@dataclass(frozen=True, slots=True)
class Extra:
    """An optional dependency: its packages, its purpose, and the extra that installs it."""

    packages: tuple[str, ...]
    purpose: str
    extra: str


EXTRAS = (
    Extra(("typer", "rich"), "this command line", "cli"),
    Extra(("fastapi", "uvicorn"), "penstock serve", "server"),
    Extra(("httpx2",), "http-request nodes, penstock runs and chat", "http"),
    Extra(("asyncpg",), "PostgreSQL", "postgres"),
    Extra(("mcp",), "tools of MCP servers, and being one", "mcp"),
    Extra(("openai",), "OpenAI and compatible servers", "openai"),
    Extra(("anthropic",), "Anthropic", "anthropic"),
    Extra(("genai-prices",), "prices of models", "prices"),
    Extra(("common-expression-language",), "conditional nodes", "conditions"),
    Extra(("opentelemetry-sdk",), "traces to OpenTelemetry", "otel"),
)
KEYS = {"openai": ("OPENAI_API_KEY",), "anthropic": ("ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN")}
"""Variables with the key of each provider that requires one; any of them is enough."""


def check_installation(registry: ExecutorRegistry | None = None) -> Iterator[Finding]:
    """Yield the findings about this process; without a `registry`, the node types of the installed packages."""
    yield Finding("python", "ok", ".".join(map(str, sys.version_info[:3])))
    yield Finding("penstock", "ok", sys.modules["penstock"].__version__)
    yield _sqlite()
    for extra in EXTRAS:
        yield _extra(extra)
    yield _node_types(ExecutorRegistry.from_entry_points() if registry is None else registry)
    for provider in KEYS:
        yield _key(provider)


def has_key(provider: str) -> bool:
    """Whether the environment of this process has the key of a provider, which is in `KEYS`."""
    return any(os.environ.get(name) for name in KEYS[provider])


def check_prices(prices: PriceBook) -> Finding:
    """Check that the price table has the prices of common models."""
    if prices.is_priced("gpt-4o"):
        return Finding("price table", "ok", "prices for the models of the usual providers")
    return Finding("price table", "missing", "no prices", "pip install 'penstock[prices]', or register your own")


def guarded(name: str, check: Callable[[], Finding]) -> Finding:
    """Run a check; an exception is reported as a broken finding."""
    try:
        return check()
    except PenstockError as error:
        return Finding(name, "broken", str(error))
    except Exception as error:
        return Finding(name, "broken", f"{type(error).__name__}: {error}")


def _sqlite() -> Finding:
    if sqlite3.sqlite_version_info[:2] < MIN_SQLITE:
        wanted = ".".join(map(str, MIN_SQLITE))
        return Finding("sqlite", "broken", sqlite3.sqlite_version, f"storing runs needs SQLite {wanted} or newer")
    return Finding("sqlite", "ok", sqlite3.sqlite_version)


def _extra(extra: Extra) -> Finding:
    try:
        found = ", ".join(f"{name} {metadata.version(name)}" for name in extra.packages)
    except metadata.PackageNotFoundError:
        return Finding(
            extra.extra, "missing", f"not installed; for {extra.purpose}", f"pip install 'penstock[{extra.extra}]'"
        )
    if "mcp" in extra.packages and (problem := mcp_problem()) is not None:
        return Finding(extra.extra, "broken", found, problem)
    return Finding(extra.extra, "ok", found)


def _node_types(registry: ExecutorRegistry) -> Finding:
    broken = []
    for name in registry:
        try:
            registry[name]
        except Exception as error:
            broken.append(f"{name} ({type(error).__name__}: {error})")
    if broken:
        return Finding("node types", "broken", "; ".join(broken), "fix or remove the package that provides it")
    return Finding("node types", "ok", f"{len(registry)}: {', '.join(sorted(registry))}")


def _key(provider: str) -> Finding:
    name = KEYS[provider][0]
    if has_key(provider):
        return Finding(name, "ok", "set")
    return Finding(name, "missing", f"not set; for {provider}:… models", f"export {name}=…")
