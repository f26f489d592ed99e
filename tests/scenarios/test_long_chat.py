"""The cost of a long chat grows with its length, not with the square of it.

In a SQLite file that is closed and opened again halfway; a thousand turns in the long form.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest

from penstock.agents.model import ModelRequest
from penstock.agents.scripted import ScriptedModel
from penstock.hosting.limits import HostSettings
from penstock.storage import open_stores
from tests.chat.chats import ALONE, ANN, Chats, chatting, hosted
from tests.soak import scaled

TURNS = scaled(160, soak=1_000)
QUESTION = "What about dam number {}? " + "It is a long question. " * 100
ANSWER = "Dam number {} holds. " + "It is a long answer, and a true one. " * 100
COPIES = 3
"""The messages have the text once. What belongs to them (a run, its journal and its account, ids, times, limits,
indexes, half-filled pages) has to fit into the rest. Events, and an empty database, are counted separately."""


class Answers:
    """A model that counts, and remembers how many messages it received."""

    def __init__(self, characters: int) -> None:
        self.received: list[int] = []
        self._characters = characters
        self.model = ScriptedModel(self._answer, piece_characters=500)

    def _answer(self, request: ModelRequest) -> str:
        self.received.append(len(request.messages))
        return ANSWER.format(len(self.received))[: self._characters]


@pytest.mark.reliability
@pytest.mark.requirement("K-15")
@pytest.mark.timeout(1_200)
@pytest.mark.parametrize(("asks", "answers"), [(1_000, 1_000), (100, 1_900)])
async def test_each_turn_of_a_long_chat_costs_the_same_and_nothing_of_it_is_lost(
    tmp_path: Path, asks: int, answers: int
) -> None:
    file, model = tmp_path / "chats.db", Answers(answers)
    settings = HostSettings(tick_s=30)
    questions = [QUESTION.format(number)[:asks] for number in range(1, TURNS + 1)]
    async with await open_stores(f"sqlite:///{file}"):
        pass
    empty = await size_of(file)
    stores = await open_stores(f"sqlite:///{file}")
    async with stores, chatting(ALONE, {"A": model.model}, stores=stores, settings=settings) as chats:
        chat_id = chats.chat_id
        await talk(chats, chat_id, questions[: TURNS // 2])
    half = await size_of(file)
    stores = await open_stores(f"sqlite:///{file}")
    async with stores, hosted(stores, {"A": model.model}, settings=settings) as chats:
        await talk(chats, chat_id, questions[TURNS // 2 :])
        tree = await chats.service.tree(chat_id)
    whole, events = await size_of(file), await size_of_events(file)
    assert model.received == list(range(1, 2 * TURNS, 2))
    answered = [ANSWER.format(number)[:answers] for number in range(1, TURNS + 1)]
    texts = [text for turn in zip(questions, answered, strict=True) for text in turn]
    assert [one.content for one in tree.active_path()] == texts
    assert whole - empty <= COPIES * sum(map(len, texts)) + events
    assert whole - half <= 1.1 * (half - empty)


async def talk(chats: Chats, chat_id: str, questions: Sequence[str]) -> None:
    for question in questions:
        turn = await chats.service.stream_chat(chat_id, question, owner=ANN)
        assert (await turn.result()).data["state"] == "complete"


async def size_of(file: Path) -> int:
    """All files of the database; what still stands in its log is written where it belongs first."""

    def measured() -> int:
        with closing(sqlite3.connect(file)) as database:
            database.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        return sum(one.stat().st_size for one in file.parent.glob(f"{file.name}*"))

    return await asyncio.to_thread(measured)


async def size_of_events(file: Path) -> int:
    """What the events alone take: as large as a database that has nothing else."""
    alone = file.with_name("events alone")

    def measured() -> int:
        with closing(sqlite3.connect(alone, isolation_level=None)) as database:
            database.execute("PRAGMA page_size = 1024")
            database.execute("ATTACH ? AS whole", (str(file),))
            (made,) = database.execute("SELECT sql FROM whole.sqlite_schema WHERE name = 'events'").fetchone()
            database.execute(made)
            database.execute("INSERT INTO events SELECT * FROM whole.events")
        return alone.stat().st_size

    return await asyncio.to_thread(measured)
