"""How often the garbage collector looks in a process that serves."""

from __future__ import annotations

import gc
import signal
from pathlib import Path

import pytest

from penstock.cli.service.collecting import SELDOM, collected_seldom, set_apart
from tests.cli.conftest import Penstock
from tests.cli.service.test_serve import served

TELLING = """
import gc

from penstock.agents.model import Model, ModelResponse


class Telling(Model):
    async def request(self, request):
        return ModelResponse(f"looks {gc.get_threshold()}, apart {gc.get_freeze_count() > 10_000}")


models = {"example": Telling("telling")}
"""


def test_it_looks_seldom_while_it_lasts_and_as_before_afterwards() -> None:
    before, apart = gc.get_threshold(), gc.get_freeze_count()
    with pytest.raises(KeyError), collected_seldom():
        assert gc.get_threshold() == SELDOM
        set_apart()
        assert gc.get_freeze_count() > apart
        raise KeyError
    assert (gc.get_threshold(), gc.get_freeze_count()) == (before, 0)


def test_what_is_set_apart_goes_like_everything_else_when_nobody_has_it() -> None:
    class Kept:
        pass

    gone: list[str] = []
    kept = Kept()
    kept.__class__.__del__ = lambda self: gone.append("gone")  # type: ignore[attr-defined]
    with collected_seldom():
        set_apart()
        del kept
        assert gone == ["gone"]


def test_a_server_looks_seldom_and_not_at_what_was_there_when_it_began(directory: Path, penstock: Penstock) -> None:
    (directory / "telling.py").write_text(TELLING)
    with served("--db", "memory:", "--models", "telling.py:models") as server:
        ended = penstock("chat", "assistant", "-m", "hello", "--url", server.url)
        assert f"looks {SELDOM}, apart True" in ended.out
        assert server.stop(signal.SIGTERM) == (0, "")
