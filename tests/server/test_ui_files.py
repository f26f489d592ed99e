"""The built UI over HTTP: one page, its assets, and what stands in for them."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from penstock.server.ui_files import NO_UI, POLICY, UiFiles, load_ui
from tests.server.served import served


@pytest.fixture
def ui(tmp_path: Path) -> UiFiles:
    """A UI as the build writes it."""
    folder = tmp_path / "ui"
    (folder / "assets").mkdir(parents=True)
    (folder / "index.html").write_text("<!doctype html><title>UI</title>")
    (folder / "assets" / "app-1a2b.js").write_text("void 0;\n" * 500)
    return load_ui(folder)


def test_a_folder_without_a_page_is_no_ui(tmp_path: Path) -> None:
    assert load_ui(tmp_path) is NO_UI


def test_a_file_of_an_unknown_type_is_not_loaded_as_something_else(tmp_path: Path) -> None:
    (tmp_path / "assets").mkdir()
    (tmp_path / "index.html").write_text("")
    (tmp_path / "assets" / "odd.xyz").write_text("")
    with pytest.raises(KeyError):
        load_ui(tmp_path)


async def test_the_page_is_revalidated_and_its_assets_are_kept(ui: UiFiles) -> None:
    async with served(ui=ui) as server, server.client() as anyone:
        page, asset = await anyone.get("/"), await anyone.get("/assets/app-1a2b.js")
    assert (page.status_code, page.headers["cache-control"]) == (200, "no-cache")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert asset.headers["cache-control"] == "public, max-age=31536000, immutable"
    assert asset.headers["content-type"] == "text/javascript; charset=utf-8"
    assert page.headers["content-security-policy"] == asset.headers["content-security-policy"] == POLICY
    assert "unsafe" not in POLICY
    assert asset.headers["x-content-type-options"] == "nosniff"


async def test_assets_are_compressed_for_clients_that_accept_it(ui: UiFiles) -> None:
    async with served(ui=ui) as server:
        async with server.client(**{"Accept-Encoding": "gzip"}) as browser:
            zipped = await browser.get("/assets/app-1a2b.js")
        async with server.client(**{"Accept-Encoding": "identity"}) as other:
            plain = await other.get("/assets/app-1a2b.js")
    assert (zipped.headers["content-encoding"], "content-encoding" in plain.headers) == ("gzip", False)
    assert int(zipped.headers["content-length"]) == len(gzip.compress(plain.content, mtime=0)) < len(plain.content)
    assert zipped.content == plain.content
    assert plain.headers["vary"] == "Accept-Encoding"


@pytest.mark.parametrize("name", ["gone.js", "..%2findex.html", "index.html"])
async def test_a_file_that_is_no_asset_is_not_found(ui: UiFiles, name: str) -> None:
    async with served(ui=ui) as server, server.client("ann") as ann:
        answer = await ann.get(f"/assets/{name}")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")


async def test_without_a_built_ui_the_start_page_says_how_to_build_it() -> None:
    async with served() as server, server.client("ann") as ann:
        page = await ann.get("/")
    assert "<code>make ui</code>" in page.text
    assert "penstock chat" in page.text
