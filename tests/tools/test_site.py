"""The documentation site builds strictly, has every public name, loads nothing from outside, and searches offline."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from mkdocs.utils import yaml_load
from playwright.async_api import expect

from tests.ui.browser import browsing, tab
from tools.pictures import SCENES
from tools.site import api, commands, settings

ROOT = Path(__file__).parents[2]
LOADED = re.compile(r"<(?:script|link|img|iframe|source)\b[^>]*?\b(?:src|href)=[\"']?(https?://[^\"' >]+)")

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as `make docs` builds it; a broken link, anchor or reference fails the build."""
    folder = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(folder)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


@pytest.mark.requirement("X-16")
def test_every_public_name_has_an_entry_in_the_reference(site: Path) -> None:
    for module in api.MODULES:
        pages = [(site / f"reference/python/{name}.html").read_text("utf-8") for name in ("penstock", module)]
        missing = [name for name in api.public(module) if not any(f">{name}</span>" in page for page in pages)]
        assert not missing, module


def test_pages_load_nothing_from_other_hosts(site: Path) -> None:
    loaded = {
        (str(page.relative_to(site)), url)
        for page in site.rglob("*.html")
        for url in LOADED.findall(page.read_text("utf-8"))
    }
    assert loaded == set()


def test_pictures_of_the_web_ui_have_the_colours_of_the_page(site: Path) -> None:
    for name, least in (("web-ui.html", 10), ("overview.html", 1)):
        page = (site / name).read_text("utf-8")
        light = re.findall(r'src="([^"]*)-light\.png#only-light"', page)
        assert len(light) >= least
        assert light == re.findall(r'src="([^"]*)-dark\.png#only-dark"', page)
        assert all((site / f"{one}-{theme}.png").is_file() for one in light for theme in ("light", "dark"))


def test_every_picture_is_made_by_the_script_and_shown_by_a_page() -> None:
    pages = "\n".join(path.read_text("utf-8") for path in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")))
    shown = set(re.findall(r"images/([\w-]+)-(?:light|dark)\.png", pages))
    assert shown <= set(SCENES)
    files = {path.name for path in (ROOT / "docs" / "images").iterdir()}
    assert files == {f"{name}-{theme}.png" for name in shown for theme in ("light", "dark")}


def test_every_command_and_setting_is_in_the_reference(site: Path) -> None:
    page = (site / "reference/command-line.html").read_text("utf-8")
    for command in (
        "penstock run",
        "penstock exec",
        "penstock runs grant",
        "penstock tokens create",
        "penstock db backup",
    ):
        assert f">{command}<" in page, command
    assert "--max-cost" in commands.page()
    for cls in settings.CLASSES:
        assert [name for name, _, text in settings.fields(cls) if not text] == []
    assert [name for name, _, text in settings.variables() if not text] == []
    for name, _, _ in settings.variables():
        assert name in (site / "reference/settings.html").read_text("utf-8")


def test_every_page_of_the_folder_is_in_the_navigation() -> None:
    config = (ROOT / "mkdocs.yml").read_text("utf-8")
    assert yaml_load(config)["strict"] is True
    pages = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    assert sorted(page for page in pages if page not in config) == []


@pytest.mark.requirement("X-16")
async def test_search_works_on_pages_opened_from_a_folder(site: Path) -> None:
    async with browsing() as browser, tab(browser) as opened:
        page = opened.page
        await page.goto((site / "index.html").as_uri())
        await page.keyboard.press("/")
        await page.get_by_role("textbox", name="Search").press_sequentially("unresolved")
        await expect(page.locator(".md-search-result__list")).to_contain_text("Resolve unresolved bills")
