"""Patches of HTTP libraries, so that every request passes through Penstock.

A patch wraps one method of a library. Libraries that are loaded are patched at once, the others when they are first
imported. Knows nothing of runs: what a wrapped method does is the patch's own.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Method = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Patch:
    """A method through which a library sends requests, and what is put around it."""

    module: str
    """Name of the module that defines the class."""
    owner: str
    """Name of the class."""
    method: str
    wrap: Callable[[Method], Method]
    """Returns the replacement of the original method."""


@functools.cache
def installed(*libraries: str) -> tuple[str, ...]:
    """Return the libraries that can be imported; cached, because the look-up searches directories."""
    return tuple(name for name in libraries if importlib.util.find_spec(name) is not None)


class Hooks:
    """Patches, applied when the first scope is entered and removed when the last one exits."""

    def __init__(self, patches: tuple[Patch, ...]) -> None:
        self._patches = patches
        self._lock = threading.Lock()
        self._scopes = 0
        self._hooked: list[tuple[type, str, Any, Any]] = []

    def take(self) -> None:
        with self._lock:
            self._scopes += 1
            for patch in self._patches:
                if patch.module in sys.modules:
                    self._hook(patch)

    def give_back(self) -> None:
        with self._lock:
            self._scopes -= 1
            if self._scopes == 0:
                for owner, method, original, ours in self._hooked:
                    # If another library has patched on top of ours, ours stays and passes every request on.
                    if getattr(owner, method) is ours:
                        setattr(owner, method, original)
                self._hooked.clear()

    def _hook(self, patch: Patch) -> None:
        owner = getattr(sys.modules[patch.module], patch.owner)
        if any(owner is hooked and patch.method == method for hooked, method, *_ in self._hooked):
            return
        original = getattr(owner, patch.method)
        ours = functools.wraps(original)(patch.wrap(original))
        setattr(owner, patch.method, ours)
        self._hooked.append((owner, patch.method, original, ours))
