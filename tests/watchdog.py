"""The timeout of every test, watched by one thread for the whole process.

pytest-timeout starts and joins a thread for each test, and both wait for the other cores of a busy machine. Here, one
thread looks once in a while whether the test that runs has passed its time, and then does what pytest-timeout does.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import pytest_timeout  # type: ignore[import-untyped]

LOOKS_EVERY_S = 0.5

_now = time.monotonic  # tests replace clocks


class Watchdog:
    """A plugin of pytest that sets and cancels the timers of pytest-timeout."""

    def __init__(self) -> None:
        self._watched: tuple[float, pytest.Item, Any] | None = None
        self._thread: threading.Thread | None = None
        self._is_over = threading.Event()

    @pytest.hookimpl(tryfirst=True)
    def pytest_timeout_set_timer(self, item: pytest.Item, settings: Any) -> bool | None:
        """Leave it to pytest-timeout where a signal is to come, as with `--timeout-method=signal`."""
        if settings.method != "thread":
            return None
        self._watched = _now() + settings.timeout, item, settings
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="watchdog of the tests", daemon=True)
            self._thread.start()
        return True

    @pytest.hookimpl(tryfirst=True)
    def pytest_timeout_cancel_timer(self) -> None:
        """Forget the test; pytest-timeout cancels what it may have set itself."""
        self._watched = None

    def pytest_unconfigure(self) -> None:
        self._is_over.set()
        if self._thread is not None:
            self._thread.join()

    def _watch(self) -> None:
        while not self._is_over.wait(LOOKS_EVERY_S):
            watched = self._watched
            if watched is not None and _now() > watched[0]:
                pytest_timeout.timeout_timer(*watched[1:])  # ends the process, unless a debugger is at work
