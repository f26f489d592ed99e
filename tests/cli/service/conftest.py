"""Here the node types that come with the package are offered, as they are to a server."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def only_what_tests_install() -> None:
    """Everything that is installed."""
