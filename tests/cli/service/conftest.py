"""Here the node types that come with the package are offered, as they are to a server, and servers can be forked."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.forked import fork_server


@pytest.fixture(autouse=True)
def only_what_tests_install() -> None:
    """Everything that is installed."""


@pytest.fixture(autouse=True, scope="package")
def forks() -> Iterator[None]:
    """One server for all: it is there before a test is watched for what it leaves."""
    with fork_server():
        yield
