"""How often the garbage collector looks in a process that serves."""

from __future__ import annotations

import gc
import signal
from pathlib import Path

import pytest

from penstock.cli.service.gc_tuning import RELAXED_THRESHOLDS, freeze_heap, relaxed_gc
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
    with pytest.raises(KeyError), relaxed_gc():
        assert gc.get_threshold() == RELAXED_THRESHOLDS
        freeze_heap()
        assert gc.get_freeze_count() > apart
        raise KeyError
    assert (gc.get_threshold(), gc.get_freeze_count()) == (before, 0)


def test_frozen_objects_are_freed_by_reference_counting() -> None:
    class Kept:
        pass

    gone: list[str] = []
    kept = Kept()
    kept.__class__.__del__ = lambda self: gone.append("gone")  # type: ignore[attr-defined]
    with relaxed_gc():
        freeze_heap()
        del kept
        assert gone == ["gone"]


@pytest.mark.usefixtures("forks")
def test_a_server_looks_seldom_and_not_at_what_was_there_when_it_began(directory: Path, penstock: Penstock) -> None:
    (directory / "telling.py").write_text(TELLING)
    with served("--db", "memory:", "--models", "telling.py:models") as server:
        ended = penstock("chat", "assistant", "-m", "hello", "--url", server.url)
        assert f"looks {RELAXED_THRESHOLDS}, apart True" in ended.out
        code, log = server.stop(signal.SIGTERM)
        assert (code, log.splitlines()[1:]) == (0, [])
        assert log.startswith("model 'telling' has no known price")
