"""Call back when named modules are imported.

A finder stands first on `sys.meta_path` while one of the modules is not imported yet, and costs every other import one
look-up. It finds a module through the other finders, and puts itself around the loader until the module was executed:
what looks at the module afterwards sees the loader it always had. Reloading a module while the finder is there calls
back again.

Knows nothing of what is done with the modules.
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
        """The names that this thread is looking for: another finder may ask every finder again, this one included."""

    def watch(self) -> None:
        """Stand first among the finders while a module is missing, and leave when none is.

        The list is replaced and not changed: a thread that walks over it at this moment would skip a finder.
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
        """Return the spec that the other finders have, with a loader that reports the import."""
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
    """A loader that reports when its module was executed; everything else is the loader's around which it stands."""

    def __init__(self, loader: Any, executed: Imported) -> None:
        self._loader = loader
        self._executed = executed

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)  # type: ignore[no-any-return]  # whatever it is, it is a loader

    def exec_module(self, module: ModuleType) -> None:
        # Given back before the module runs: it may read its own source or data through its loader.
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
