"""Which tests `make check` runs: all but those listed here, those marked `reliability`, and those on PostgreSQL.

A test belongs here if it starts processes or servers, opens databases, explores many schedules, or is otherwise too
slow for the inner loop. `pytest --unit` leaves these files out before it imports them; `make test` runs everything.
"""

from __future__ import annotations

from pathlib import Path

import pytest

TESTS = Path(__file__).parent

NOT_UNIT = (
    "cli",
    "gateway",
    "providers",
    "realmodel",
    "reliability",
    "scenarios",
    "server",
    "storage",
    "telemetry",
    "ui",
    "chat/test_conversation.py",
    "containment/test_accounts.py",
    "flow/test_isolation.py",
    "hosting/test_crash_loop.py",
    "hosting/test_elapsed.py",
    "hosting/test_grants.py",
    "hosting/test_on_databases.py",
    "kernel/test_frontier.py",
    "kernel/test_inv_07_bad_graphs.py",
    "nodes/test_memory_hosted.py",
    "runtime/billing/test_loading_prices.py",
    "runtime/durable/test_journal_interrupted.py",
    "runtime/durable/test_journal_keys.py",
    "runtime/scheduling/test_exclusive.py",
    "testing/test_http_provider.py",
    "test_docs.py",
    "test_docs_cover_the_api.py",
    "test_forked.py",
    "test_import_cost.py",
    "test_structure_script.py",
    "tools/test_ui_types.py",
)
"""Folders and files, relative to this one."""


def is_unit(path: Path) -> bool:
    """Whether the tests of that file or folder are unit tests."""
    return not any(path.is_relative_to(TESTS / name) for name in NOT_UNIT)


def is_unit_test(item: pytest.Item) -> bool:
    """Whether a test of such a file is a unit test itself."""
    return item.get_closest_marker("reliability") is None and not _needs_postgres(item)


def _needs_postgres(item: pytest.Item) -> bool:
    parameters = getattr(getattr(item, "callspec", None), "params", {})
    is_parameter = any(isinstance(value, str) and value.startswith("postgres") for value in parameters.values())
    return is_parameter or "postgres_server" in getattr(item, "fixturenames", ())
