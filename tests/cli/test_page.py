"""docs/cli.md has every option and exit code of `penstock run`; its commands are typed in `tests/docs`."""

from __future__ import annotations

from pathlib import Path

PAGE = (Path(__file__).parents[2] / "docs" / "cli.md").read_text()


def test_the_page_names_every_option_and_exit_code() -> None:
    from penstock.cli.exits import Exit
    from penstock.cli.run_command import LIMITS

    offered = ("--models", "--tools", "--executors", "--prices", "--unknown-prices")
    for option in (*LIMITS, "--input", "--max-parallel", *offered, "--approve", "--json"):
        assert f"| `{option}" in PAGE
    for code in Exit:
        assert f"| {int(code)} | " in PAGE
