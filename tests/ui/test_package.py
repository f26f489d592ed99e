"""What is installed: archives carry the built UI and the licences of what it contains, and it works without node or a
network.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import urllib.request
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.async_api import expect

from tests.ui.browser import Server, browsing, tab

pytestmark = pytest.mark.timeout(300)

ROOT = Path(__file__).parents[2]
UI = "penstock/server/ui/"
BUILD_TOOLS = {"vite"}
"""Dependencies of the UI that its build needs, and that are no part of what is built."""


def build(kind: str, source: Path, to: Path, path: str | None = None) -> Path:
    """Build an archive as pip does; `path` is the PATH that the build sees."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(to)]
    environment = None if path is None else {"PATH": path}
    subprocess.run(command, cwd=source, env=environment, check=True, capture_output=True)
    (archive,) = to.glob("*.whl" if kind == "wheel" else "*.tar.gz")
    return archive


def ui_files(wheel: Path) -> dict[str, bytes]:
    """Return the files of the UI in a wheel by their name."""
    with zipfile.ZipFile(wheel) as archive:
        return {name.removeprefix(UI): archive.read(name) for name in archive.namelist() if name.startswith(UI)}


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source archive, unpacked; without what the build and the tests of the UI download."""
    folder = tmp_path_factory.mktemp("sdist")
    with tarfile.open(build("sdist", ROOT, folder)) as archive:
        archive.extractall(folder, filter="data")
    (source,) = (one for one in folder.iterdir() if one.is_dir())
    return source


@pytest.fixture(scope="module")
def wheel(unpacked: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel that was built from the source archive where there is no node."""
    return build("wheel", unpacked, tmp_path_factory.mktemp("wheel"), path="")


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of the wheel, installed in an environment of its own; its dependencies are those of the tests."""
    folder = tmp_path_factory.mktemp("installed")
    environment, uv = folder / "env", str(Path(sys.executable).with_name("uv"))
    python = environment / "bin" / "python"
    subprocess.run([uv, "venv", "--quiet", "--offline", "--python", sys.executable, str(environment)], check=True)
    install = [uv, "pip", "install", "--quiet", "--offline", "--no-deps", "--python", str(python), str(wheel)]
    subprocess.run(install, check=True)
    (site,) = environment.glob("lib/python*/site-packages")
    # A path that a .pth file adds has its own .pth files ignored: the editable Penstock of the tests is not found.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"), "utf-8")
    found = subprocess.run(
        [python, "-c", "import penstock; print(penstock.__file__)"], check=True, capture_output=True, text=True
    )
    assert Path(found.stdout.strip()).is_relative_to(environment)
    path = str(python.parent)
    assert shutil.which("node", path=path) is None
    server = Server(folder, program=(str(python.with_name("penstock")),), path=path)
    server.start()
    yield server
    server.kill()


def test_a_wheel_carries_the_ui_and_its_licences(tmp_path: Path) -> None:
    files = ui_files(build("wheel", ROOT, tmp_path))
    assert {"index.html", "licenses.md"} <= files.keys()
    assert {Path(name).suffix for name in files if name.startswith("assets/")} == {".js", ".css", ".svg"}
    dependencies = json.loads((ROOT / "ui" / "package.json").read_text("utf-8"))["dependencies"].keys() - BUILD_TOOLS
    lines = files["licenses.md"].decode().splitlines()
    headed = {line.removeprefix("## ").partition(" - ")[0] for line in lines if line.startswith("## ")}
    assert headed >= dependencies | {"scheduler", "d3-zoom", "@xyflow/system"}  # and what these bring along


def test_a_source_archive_carries_the_ui_so_that_building_from_it_needs_no_node(unpacked: Path, wheel: Path) -> None:
    built = unpacked / "src" / UI
    files = {str(file.relative_to(built)): file.read_bytes() for file in built.rglob("*") if file.is_file()}
    assert {"index.html", "licenses.md"} <= files.keys()
    assert ui_files(wheel) == files
    assert not list(unpacked.rglob("node_modules")), "the archive has what the build downloads"


@pytest.mark.requirement("X-18")
def test_every_file_of_the_ui_is_served_as_the_wheel_has_it(installed: Server, wheel: Path) -> None:
    files = ui_files(wheel)
    with urllib.request.urlopen(f"{installed.url}/") as page:
        assert page.read() == files["index.html"]
    for name in files:
        if name.startswith("assets/"):
            with urllib.request.urlopen(f"{installed.url}/{name}") as asset:
                assert asset.read() == files[name], name


@pytest.mark.requirement("X-18")
async def test_the_installed_ui_shows_a_run_and_needs_nothing_but_its_server(installed: Server) -> None:
    async with browsing() as browser, tab(browser) as opened:
        page, outside = opened.page, list[str]()
        # Whatever is not the server fails, as without a network, and an error on the console fails the test.
        await page.context.route(lambda url: not url.startswith(installed.url), lambda route: route.abort())
        page.on("request", lambda sent: None if sent.url.startswith(installed.url) else outside.append(sent.url))
        await page.goto(f"{installed.url}/#/start?graph=pipeline")
        await page.get_by_label("Input", exact=True).fill("count to 5")
        await page.get_by_role("button", name="Start", exact=True).click()
        await expect(page.get_by_text("The run is completed")).to_have_count(1)
        for view, drawn in (("Flame", ".flame"), ("Graph", ".graph-card")):  # loaded from assets of their own
            await page.get_by_role("tab", name=view).click()
            await expect(page.locator(drawn).first).to_be_visible()
        for place in ("chat", "graphs/pipeline", "approvals", "bills", "money", "diff", "connect", "admin/health"):
            await page.goto(f"{installed.url}/#/{place}")
            await expect(page.get_by_role("heading", level=1).first).to_be_visible()
            await expect(page.get_by_text("This page cannot be shown")).to_have_count(0)
        assert outside == []
