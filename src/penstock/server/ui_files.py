"""The built web UI: files of the package, loaded once and served from memory.

The build of `ui/` writes one page and its assets, whose names contain a hash of their content, into `FOLDER`. A package
without them, such as a fresh clone before `make ui`, has no UI; the server then serves its start page instead. This
module knows files and headers, and nothing of routes.
"""

from __future__ import annotations

import gzip
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from importlib.resources.abc import Traversable

CONTENT_TYPES: Mapping[str, str] = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".md": "text/markdown; charset=utf-8",
}
"""Every type of file that the build may write; loading fails for any other, so that none is served as a wrong type."""

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data: blob:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "worker-src 'self'; require-trusted-types-for 'script'; trusted-types penstock-worker"
)
"""Content security policy of the UI: its own files and its own API, no inline code, no HTML from strings.

The only policy of trusted types lets the page start its worker, and creates no HTML and no other script."""

PAGE_CACHING = "no-cache"
ASSET_CACHING = "public, max-age=31536000, immutable"
GZIP_MIN_BYTES = 1_000
"""Smaller files are not worth compressing."""


@dataclass(frozen=True, slots=True)
class UiFile:
    """One file, with a compressed copy if that is smaller."""

    content_type: str
    content: bytes
    compressed: bytes | None

    def response(self, caching: str, *, is_compressed: bool) -> tuple[bytes, dict[str, str]]:
        """Return the body, for a client that accepts gzip or does not, and its headers."""
        headers = {
            "Content-Type": self.content_type,
            "Content-Security-Policy": POLICY,
            "Cache-Control": caching,
        }
        if is_compressed and self.compressed is not None:
            return self.compressed, {**headers, "Content-Encoding": "gzip"}
        return self.content, headers


@dataclass(frozen=True, slots=True)
class UiFiles:
    """The page and its assets by name; without a page there is no UI."""

    page: UiFile | None = None
    assets: Mapping[str, UiFile] = field(default_factory=dict)


NO_UI = UiFiles()


def load_ui(folder: Traversable | None = None) -> UiFiles:
    """Load the built UI from `folder`, by default from the package; NO_UI if it has not been built."""
    folder = folder or files("penstock.server") / "ui"
    page = folder / "index.html"
    if not page.is_file():
        return NO_UI
    assets = {asset.name: _load(asset) for asset in (folder / "assets").iterdir() if asset.is_file()}
    return UiFiles(_load(page), assets)


def _load(file: Traversable) -> UiFile:
    content = file.read_bytes()
    suffix = file.name[file.name.rfind(".") :]
    compressed = gzip.compress(content, mtime=0) if len(content) >= GZIP_MIN_BYTES else None
    return UiFile(CONTENT_TYPES[suffix], content, compressed)
