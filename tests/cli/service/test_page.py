"""docs/cli-service.md has every option of `penstock serve`; its commands are typed in `tests/docs`."""

from __future__ import annotations

import re
from pathlib import Path

from penstock.cli.service import serve
from penstock.storage import newest_version

PAGE = (Path(__file__).parents[3] / "docs" / "cli-service.md").read_text()


def test_the_page_names_every_option_of_serve() -> None:
    for parameter in serve.serve.__annotations__:
        option = "GRAPHS" if parameter == "graphs" else f"--{parameter.replace('_', '-')}"
        if parameter != "return":
            assert f"`{option}" in PAGE, option


def test_the_page_shows_the_version_that_databases_have() -> None:
    shown = re.findall(r"^(?:sqlite\S+|✓ database) +version (\d+), ", PAGE, re.MULTILINE)
    assert shown == [str(newest_version())] * 2
