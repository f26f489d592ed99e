"""Call back when named modules are imported.

While one of the modules is not imported yet, a finder is first on `sys.meta_path`, which costs every other import one
look-up. It finds a module through the other finders, and wraps the loader until the module has been executed. After
that, the module has its original loader. Reloading a module while the finder is installed calls back again.

Knows nothing of the purpose of the callbacks.
"""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

Imported = Callable[[ModuleType], None]
Find = Callable[[str, Sequence[str] | None, ModuleType | None], ModuleSpec | None]


class ImportWatcher:
    """A finder that reports when one of the named modules was imported."""

    def __init__(self, names: Sequence[str], imported: Imported) -> None:
        self._names = frozenset(names)
        self._imported = imported
        self._here = threading.local()
        """Names that this thread is looking up: another finder may ask every finder again, including this one."""

    def watch(self) -> None:
        """Put this finder first while a module is missing, and remove it when none is.

        The list is replaced, not changed in place: a thread that is iterating over it would skip a finder.
        """
        others = [finder for finder in sys.meta_path if finder is not self]
        if any(sys.modules.get(name) is None for name in self._names):
            if sys.meta_path[:1] != [self]:
                sys.meta_path = [self, *others]
        elif len(others) < len(sys.meta_path):
            sys.meta_path = others

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec found by the other finders, with a loader that reports the import."""
        if name not in self._names:
            return None
        searched: set[str] = self._here.__dict__.setdefault("names", set())
        if name in searched:
            return None
        searched.add(name)
        try:
            spec = self._found(name, path, target)
        finally:
            searched.discard(name)
        if spec is not None and hasattr(spec.loader, "exec_module"):
            spec.loader = _Loader(spec.loader, self._executed)
        return spec

    def _found(self, name: str, path: Sequence[str] | None, target: ModuleType | None) -> ModuleSpec | None:
        for finder in sys.meta_path:
            find: Find | None = None if finder is self else getattr(finder, "find_spec", None)
            if find is not None and (spec := find(name, path, target)) is not None:
                return spec
        return None

    def _executed(self, module: ModuleType) -> None:
        self._imported(module)
        self.watch()


class _Loader(Loader):
    """Wraps a loader, and reports when its module has been executed; every other attribute is that of the wrapped
    loader.
    """

    def __init__(self, loader: Any, executed: Imported) -> None:
        self._loader = loader
        self._executed = executed

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)  # type: ignore[no-any-return]  # whatever it is, it is a loader

    def exec_module(self, module: ModuleType) -> None:
        # Restored before the module runs: it may read its own source or data through its loader.
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._executed(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def loaded(name: str) -> ModuleType | None:
    """Return the module if it is imported; waits for a thread that is in the middle of importing it."""
    module = sys.modules.get(name)
    if module is None:  # not imported, or forbidden: `sys.modules[name] = None`
        return None
    if getattr(module.__spec__, "_initializing", False):
        return importlib.import_module(name)
    return module
