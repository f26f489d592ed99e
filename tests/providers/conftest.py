"""Fixtures for tests of providers."""

from __future__ import annotations

import socket

import pytest


@pytest.fixture
def at_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every host name be this machine."""
    look_up = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *rest, **more: look_up("127.0.0.1", *rest, **more))
