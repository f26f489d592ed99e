"""Patches of libraries, which route their calls through Penstock.

A patch wraps one method of a class. Loaded libraries are patched immediately, the others on import. Patches stay in
place: a task or a thread may outlive the block that installed them.

Other tools patch the same methods. Their wrappers, around ours or below, change nothing. If another tool restores the
method that it found before us, our wrapper is gone; the next `install` notices and wraps again. If another tool hides
our wrapper in a function without `__wrapped__`, the next `install` cannot see it and wraps again too. So a call may
pass through several of our wrappers: the newest handles it, and those below pass it on. An older one handles a call
that reaches it directly, because the newest was removed. A call that a method makes to itself, such as a retry, passes
through the newest again, and is another call.

Knows nothing of runs: each patch defines what its wrapper does.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from inspect import iscoroutinefunction, signature
from types import ModuleType
from typing import Any, TypeGuard

from penstock.errors import PenstockError
from penstock.providers.importing import ImportWatcher, loaded

Method = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Patch:
    """A method of a library, and the wrapper to put around it."""

    module: str
    """Name of the module that defines the class."""
    owner: str
    """Name of the class."""
    method: str
    wrap: Callable[[Method], Method]
    """Returns the replacement of the original method."""
    needs: str = ""
    """Name of a parameter that the method must have."""

    @property
    def name(self) -> str:
        """What the library must have, in full."""
        needed = f"({self.needs}=…)" if self.needs else ""
        return f"{self.module}.{self.owner}.{self.method}{needed}"

    def fits(self, owner: object) -> TypeGuard[type]:
        """Whether `owner` is the class to patch."""
        # The class must define the method itself: an inherited one is a stub, or is patched on the class that defines
        # it.
        if not isinstance(owner, type) or self.method not in vars(owner):
            return False
        return not self.needs or _takes(vars(owner)[self.method], self.needs)


class HookFailed(PenstockError):
    """A library does not have the method through which it is contained."""

    def __init__(self, patch: Patch) -> None:
        self.patch = patch
        self.library = patch.module.partition(".")[0]
        self.version = _version(self.library)
        super().__init__(
            f"requests of {self.library} {self.version} cannot be contained: it has no {patch.name};"
            f" install another version of {self.library}"
        )


@functools.cache
def installed(*libraries: str) -> tuple[str, ...]:
    """Return the libraries that can be imported; cached, because the look-up searches directories."""
    return tuple(name for name in libraries if importlib.util.find_spec(name) is not None)


def built_on(client: Any) -> str:
    """Return the HTTP library of an official client: httpx2, or httpx before openai 3 and anthropic 1."""
    roots = {base.__module__.partition(".")[0] for base in client.DefaultAsyncHttpxClient.__mro__}
    return "httpx2" if "httpx2" in roots else "httpx"


class Hooks:
    """Patches that stay in place from the first `install` on."""

    def __init__(self, patches: tuple[Patch, ...], failed_later: Callable[[HookFailed], None]) -> None:
        self._patches = patches
        self._failed_later = failed_later
        """Called when a hook fails at the import of its library; it may raise."""
        self._lock = threading.Lock()
        self._methods: dict[tuple[type | None, str], _Patched] = {}
        self._watcher = ImportWatcher([patch.module for patch in patches], self._imported)
        os.register_at_fork(after_in_child=self._forked)

    def install(self) -> list[HookFailed]:
        """Patch every library that is loaded, and the others when they are imported; return the hooks that failed.

        Idempotent, and safe from any thread.
        """
        # First: a module whose import begins in another thread after the loop has passed it is still reported.
        self._watcher.watch()
        modules = [(patch, loaded(patch.module)) for patch in self._patches]
        return [failure for patch, module in modules if (failure := self._hook(patch, module)) is not None]

    def removed(self) -> list[str]:
        """Return the methods that another tool has restored to their state before our patch."""
        return [patched.name for patched in list(self._methods.values()) if patched.is_removed()]

    def _imported(self, module: ModuleType) -> None:
        for patch in self._patches:
            if patch.module == module.__name__ and (failure := self._hook(patch, module)) is not None:
                self._failed_later(failure)

    def _hook(self, patch: Patch, module: ModuleType | None) -> HookFailed | None:
        if module is None:
            return None
        owner = getattr(module, patch.owner, None)
        patched = self._methods.get((owner, patch.method))
        if patched is not None and patched.is_in_place():  # every block comes here, but signatures are inspected once
            return None
        if not patch.fits(owner):
            return HookFailed(patch)
        with self._lock:
            self._methods.setdefault((owner, patch.method), _Patched(owner, patch.method)).ensure(patch.wrap)
        return None

    def _forked(self) -> None:
        self._lock = threading.Lock()  # a thread that does not exist in this process may have held it


class _Patched:
    """One method of one class, and our wrappers of it."""

    def __init__(self, owner: type, method: str) -> None:
        self._owner = owner
        self._method = method
        self._ours: list[Method] = []
        self._newest: Method | None = None
        self._is_handled: ContextVar[bool] = ContextVar(f"penstock_{method}", default=False)
        """Whether one of our wrappers is handling a call here, so that those below it pass it on."""

    @property
    def name(self) -> str:
        """The name of the method, in full."""
        return f"{self._owner.__module__}.{self._owner.__qualname__}.{self._method}"

    def is_in_place(self) -> bool:
        """Whether the method is the newest of our wrappers."""
        return self._newest is not None and getattr(self._owner, self._method, None) is self._newest

    def is_removed(self) -> bool:
        """Whether another tool has restored a method that our wrappers are around."""
        current = getattr(self._owner, self._method, None)
        if current in self._ours:
            return False
        return any(inner is current for ours in self._ours for inner in _wrapped_by(ours))

    def ensure(self, wrap: Callable[[Method], Method]) -> None:
        """Wrap the method, unless it is wrapped. The caller holds the lock."""
        if self.is_in_place():
            return
        current = getattr(self._owner, self._method)
        found = self._visible(current)
        if found is None:
            found = self._around(current, wrap(current))
            self._ours.append(found)
            setattr(self._owner, self._method, found)
        self._newest = found

    def _visible(self, function: Method | None) -> Method | None:
        """Return the outermost of our wrappers, looking through the wrappers of other tools."""
        while function is not None:
            for ours in self._ours:
                if ours is function:
                    return ours
            function = getattr(function, "__wrapped__", None)
        return None

    def _around(self, original: Method, handler: Method) -> Method:
        if iscoroutinefunction(handler):

            @functools.wraps(original)
            async def ours(*args: Any, **kwargs: Any) -> Any:
                if self._is_handled.get() and ours is not self._newest:
                    return await original(*args, **kwargs)
                outside = self._is_handled.set(True)
                try:
                    return await handler(*args, **kwargs)
                finally:
                    self._is_handled.reset(outside)

        else:

            @functools.wraps(original)
            def ours(*args: Any, **kwargs: Any) -> Any:
                if self._is_handled.get() and ours is not self._newest:
                    return original(*args, **kwargs)
                outside = self._is_handled.set(True)
                try:
                    return handler(*args, **kwargs)
                finally:
                    self._is_handled.reset(outside)

        return ours


def _wrapped_by(function: Method) -> Iterator[Method]:
    """Yield the functions that `function` wraps, from the outside in."""
    inner: Method | None = function
    while (inner := getattr(inner, "__wrapped__", None)) is not None:
        yield inner


def _takes(method: Method, parameter: str) -> bool:
    """Whether the method takes the parameter, by its name or with `**`, as the wrappers of other tools do."""
    parameters = signature(method).parameters
    return parameter in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())


def _version(library: str) -> str:
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return "(unknown version)"
