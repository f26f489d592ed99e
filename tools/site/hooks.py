"""Hooks of MkDocs: pages that are generated from the code, and links from `docs/` to files beside it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

from tools.site import api, commands, http, nodes, settings

ROOT = Path(__file__).parents[2]
BESIDE = {
    "README.md": "overview.md",
    "ARCHITECTURE.md": "architecture.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "examples/README.md": "examples.md",
}
"""Files outside of `docs/` that are pages of the site, by the path of their page."""
WORKER = "https://unpkg.com/iframe-worker/shim"
"""A script that the theme would load from another host."""
LINK = re.compile(r"(?<=\]\()[^)\s]+(?=\))")
LIGHT = re.compile(r"(!\[[^\]]*\]\([^)\s]+)-light\.png\)")
"""A picture of a page in light colours; beside its file is one in dark colours."""


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are not in `docs/`."""
    for path, text in generated():
        files.append(File.generated(config, path, content=text))
    return files


def generated() -> Iterator[tuple[str, str]]:
    """Yield the path and the Markdown of every page that is not in `docs/`."""
    for source, path in BESIDE.items():
        from_folder = partial(_from_root, source.rpartition("/")[0])
        yield path, _in_both_themes(LINK.sub(from_folder, (ROOT / source).read_text("utf-8")))
    yield from api.pages()
    yield "reference/command-line.md", commands.page()
    yield "reference/http.md", http.page()
    yield "reference/node-types.md", nodes.page()
    yield "reference/settings.md", settings.page()


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point links from `docs/` to files beside it at their pages."""
    up = page.file.src_uri.count("/") * "../"
    return _in_both_themes(LINK.sub(lambda link: _from_docs(link[0], up), markdown))


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Load the worker of the search from the site itself."""
    return output.replace(WORKER, page.file.url.count("/") * "../" + "assets/file-worker.js")


def on_post_template(output_content: str, **_: Any) -> str:
    """Do the same for pages of the theme, which stand at the root of the site."""
    return output_content.replace(WORKER, "assets/file-worker.js")


def _in_both_themes(markdown: str) -> str:
    """Show a picture in the colours of the page: the theme hides the other one."""
    return LIGHT.sub(r"\1-light.png#only-light)\1-dark.png#only-dark)", markdown)


def _from_docs(link: str, up: str) -> str:
    path, mark, anchor = link.partition("#")
    inside = path.removeprefix(f"{up}../")
    return f"{up}{BESIDE[inside]}{mark}{anchor}" if path.startswith(f"{up}../") and inside in BESIDE else link


def _from_root(folder: str, found: re.Match[str]) -> str:
    """Return a link of a file in `folder` of the repository as a link of a page at the root of the site."""
    link = found[0]
    if link.startswith(("http://", "https://", "mailto:", "#")):
        return link
    path, mark, anchor = link.partition("#")
    parts: list[str] = folder.split("/") if folder else []
    for part in path.split("/"):
        parts = parts[:-1] if part == ".." else [*parts, part]
    full = "/".join(part for part in parts if part)
    if full in BESIDE:
        return f"{BESIDE[full]}{mark}{anchor}"
    if full == "docs":
        return "README.md"
    return f"{full.removeprefix('docs/')}{mark}{anchor}"
