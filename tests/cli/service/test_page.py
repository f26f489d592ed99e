"""docs/cli-service.md has every option of `penstock serve`; its commands are typed in `tests/docs`."""

from __future__ import annotations

from pathlib import Path

from penstock.cli.service import serve

DOCS = Path(__file__).parents[3] / "docs"
PAGE = (DOCS / "cli-service.md").read_text()


def test_the_page_names_every_option_of_serve() -> None:
    for parameter in serve.serve.__annotations__:
        option = "GRAPHS" if parameter == "graphs" else f"--{parameter.replace('_', '-')}"
        if parameter != "return":
            assert f"`{option}" in PAGE, option
