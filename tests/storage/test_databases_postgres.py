"""A database on a PostgreSQL server: conflicts, lost connections, notifications, and poolers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any
from urllib.parse import parse_qs, urlsplit

import asyncpg
import pytest

from penstock.errors import InvalidValue
from penstock.hosting.ports import Conflict, StoreUnavailable
from penstock.storage.databases import postgres
from penstock.storage.databases.port import Transaction
from penstock.storage.databases.postgres import FAULTS, PostgresDatabase, fault, numbered, shown
from tests.storage.postgres import postgres_schemas, postgres_server

__all__ = ["postgres_schemas", "postgres_server"]

MAKE = "CREATE TABLE IF NOT EXISTS notes (id BIGINT PRIMARY KEY, said TEXT NOT NULL)"


@pytest.fixture
def url(postgres_schemas: Callable[[], str]) -> str:
    return postgres_schemas()


@asynccontextmanager
async def opened(url: str) -> AsyncIterator[PostgresDatabase]:
    database = await PostgresDatabase.open(url)
    try:
        await database.write(lambda transaction: transaction.run(MAKE))
        yield database
    finally:
        await database.close()


def saying(id: int, text: str = "") -> Callable[[Transaction], Any]:
    async def act(transaction: Transaction) -> int:
        transaction.ring("said")
        return await transaction.run("INSERT INTO notes (id, said) VALUES (?, ?)", id, text)

    return act


async def said(transaction: Transaction) -> list[int]:
    return [row[0] for row in await transaction.rows("SELECT id FROM notes ORDER BY id")]


async def cut_all(url: str) -> None:
    """End every connection to the server but the one that says so."""
    connection = await asyncpg.connect(url)
    await connection.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
        "WHERE pid <> pg_backend_pid() AND application_name LIKE 'penstock%'"
    )
    await connection.close()


async def test_an_act_is_whole_or_not_there(url: str) -> None:
    async def refused(transaction: Transaction) -> None:
        await saying(1)(transaction)
        raise Conflict("no")

    async with opened(url) as database:
        with pytest.raises(Conflict):
            await database.write(refused)
        assert await database.read(said) == []
        assert await database.write(saying(1)) == 1
        assert await database.read(said) == [1]


async def test_what_is_read_is_of_one_instant_and_nothing_is_written_meanwhile(url: str) -> None:
    async with opened(url) as database:

        async def act(transaction: Transaction) -> list[list[int]]:
            before = await said(transaction)
            await database.write(saying(1))
            return [before, await said(transaction)]

        assert await database.read(act) == [[], []]
        with pytest.raises(StoreUnavailable, match="read-only"):
            await database.read(saying(2))


async def test_acts_that_wait_for_each_other_are_run_again_until_both_are_done(url: str) -> None:
    meeting: set[int] = set()
    met = asyncio.Event()

    def crossing(first: int, second: int) -> Callable[[Transaction], Any]:
        async def act(transaction: Transaction) -> None:
            await transaction.run("UPDATE notes SET said = said || 'x' WHERE id = ?", first)
            meeting.add(first)
            if len(meeting) == 2:
                met.set()
            await met.wait()
            await transaction.run("UPDATE notes SET said = said || 'x' WHERE id = ?", second)

        return act

    async with opened(url) as database:
        for id in (1, 2):
            await database.write(saying(id))
        await asyncio.gather(database.write(crossing(1, 2)), database.write(crossing(2, 1)))
        rows = await database.read(lambda transaction: transaction.rows("SELECT said FROM notes ORDER BY id"))
        assert [row[0] for row in rows] == ["xx", "xx"]


async def test_connections_that_were_cut_are_opened_again(url: str) -> None:
    async with opened(url) as database:
        await asyncio.gather(*(database.write(saying(id)) for id in range(10)))
        for id in range(10, 13):
            await cut_all(url)
            await database.write(saying(id))
            await cut_all(url)
            assert len(await database.read(said)) == id + 1


async def test_an_act_whose_connection_is_cut_before_its_end_is_run_again(url: str) -> None:
    async with opened(url) as database:
        times = 0

        async def act(transaction: Transaction) -> None:
            nonlocal times
            times += 1
            await saying(1)(transaction)
            if times == 1:
                await cut_all(url)
                await said(transaction)

        await database.write(act)
        assert (times, await database.read(said)) == (2, [1])


async def test_what_a_stopped_process_has_locked_in_a_transaction_others_get_after_a_while(url: str) -> None:
    locked, goes_on = asyncio.Event(), asyncio.Event()

    async def stops(transaction: Transaction) -> int:
        await transaction.run("UPDATE notes SET said = said || 'mine ' WHERE id = 1")
        locked.set()
        await goes_on.wait()
        return await transaction.run("UPDATE notes SET said = said || 'still' WHERE id = 1")

    async with opened(url) as database:
        stopped = await PostgresDatabase.open(url, timeout_s=0.3)
        for id in (1, 2):  # also on a connection that was used before
            await stopped.write(saying(id))
        working = asyncio.create_task(stopped.write(stops))
        await locked.wait()
        assert await database.write(lambda one: one.run("UPDATE notes SET said = 'taken ' WHERE id = 1")) == 1
        goes_on.set()
        assert await working == 1  # run again, from its beginning
        row = await database.read(lambda one: one.row("SELECT said FROM notes WHERE id = 1"))
        await stopped.close()
    assert row is not None
    assert row[0] == "taken mine still"


async def test_what_somebody_keeps_locked_is_waited_for_less_than_a_request_may_take(url: str) -> None:
    async with opened(url) as database:
        waits = await database.read(lambda transaction: transaction.rows("SHOW lock_timeout"))
        assert [tuple(row) for row in waits] == [("1500ms",)]
        other = await asyncpg.connect(url)
        try:
            await other.execute("BEGIN; LOCK TABLE notes IN ACCESS EXCLUSIVE MODE")
            for ask in (database.write(saying(1)), database.read(said)):
                with pytest.raises(StoreUnavailable, match="see who keeps a lock on the server"):
                    await ask
            await other.execute("ROLLBACK")
            await database.write(saying(2))
            assert await database.read(said) == [2]
        finally:
            await other.close()


async def test_a_caller_that_goes_away_leaves_nothing_half_done_and_no_connection_taken(url: str) -> None:
    async with opened(url) as database:
        begun, never = asyncio.Event(), asyncio.Event()

        async def act(transaction: Transaction) -> None:
            await saying(1)(transaction)
            begun.set()
            await never.wait()

        for _ in range(12):  # more than there are connections
            begun.clear()
            leaving = asyncio.ensure_future(database.write(act))
            await begun.wait()
            leaving.cancel()
            await asyncio.wait((leaving,))
        assert await database.read(said) == []


async def test_whoever_waits_hears_what_another_process_tells_also_after_its_connection_was_cut(url: str) -> None:
    async with opened(url) as database, opened(url) as other:
        for id in range(1, 4):
            while len(await database.read(said)) < id:
                seen = database.rung
                if len(await other.read(said)) < id:
                    await other.write(saying(id))
                await database.wait("said", seen, 60)
            await cut_all(url)


async def test_whoever_waits_is_told_and_need_not_look_also_of_what_nobody_heard(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres, "LOOK_S", 600)
    async with opened(url) as database, opened(url) as other:
        await database.wait("said", database.rung, 600)  # it listens from now on
        for id in (1, 2):
            seen = database.rung
            await other.write(saying(id))
            await database.wait("said", seen, 600)
            assert (await database.read(said))[-1] == id
        seen = database.rung
        await cut_all(url)
        await other.write(saying(3))
        await database.wait("said", seen, 600)
        assert (await database.read(said))[-1] == 3


async def test_an_act_whose_commit_was_not_answered_is_told_of_and_not_run_again(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit, times = asyncpg.transaction.Transaction.commit, 0

    async def commit_unheard(transaction: Any) -> None:
        await commit(transaction)
        raise ConnectionResetError("the answer was lost")

    async def act(transaction: Transaction) -> None:
        nonlocal times
        times += 1
        await saying(times)(transaction)

    async with opened(url) as database:
        with monkeypatch.context() as patch:
            patch.setattr(asyncpg.transaction.Transaction, "commit", commit_unheard)
            with pytest.raises(StoreUnavailable, match=r"the answer was lost .* then ask again"):
                await database.write(act)
        assert (times, await database.read(said)) == (1, [1])
        await database.write(act)
        assert await database.read(said) == [1, 2]


async def test_a_closed_database_says_so_and_wakes_who_waits(url: str) -> None:
    async with opened(url) as database:
        waiting = asyncio.ensure_future(database.wait("said", database.rung, 60))
        await asyncio.sleep(0)
        await database.close()
        await waiting
        for late in (database.write(saying(1)), database.read(said), database.wait("said", 0, 1)):
            with pytest.raises(StoreUnavailable, match="closed"):
                await late


async def test_a_server_that_is_not_there_is_said_without_the_password() -> None:
    with pytest.raises(StoreUnavailable, match="see whether the server runs") as told:
        await PostgresDatabase.open("postgresql://ann:secret@127.0.0.1:1/penstock?sslmode=disable")
    assert "secret" not in str(told.value)
    assert "ann@127.0.0.1:1/penstock" in str(told.value)


async def test_a_database_that_is_not_there_is_said(url: str) -> None:
    with pytest.raises(StoreUnavailable, match="make the database first"):
        await PostgresDatabase.open(url.replace("/postgres?", "/nowhere?"))


def test_what_is_no_url_is_said_without_the_password() -> None:
    with pytest.raises(InvalidValue) as told:
        shown("mysql://ann:secret@host/x")
    assert "secret" not in str(told.value)


def test_statements_are_numbered() -> None:
    assert numbered("a = ? AND b IN (?, ?)") == "a = $1 AND b IN ($2, $3)"


@pytest.mark.parametrize("kind", [asyncpg.InvalidSQLStatementNameError, asyncpg.DuplicatePreparedStatementError])
def test_statements_that_were_lost_between_say_that_a_pooler_is_there(kind: type[Exception]) -> None:
    assert isinstance(kind("x"), FAULTS)
    assert "pool_mode = session" in str(fault("here", kind("x")))


class Pooler:
    """Puts all who connect on one session of the server, as a pooler does that gives out connections by transaction.

    Who asked last is answered: for clients that ask in turn.
    """

    def __init__(self, socket: str) -> None:
        self._socket = socket
        self._greeting: bytes | None = None
        self._asking: asyncio.StreamWriter | None = None
        self._answering: asyncio.Task[None] | None = None

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One client: greeted as the first was, then each of its questions goes to the one session."""
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            size = await reader.readexactly(4)
            start = await reader.readexactly(int.from_bytes(size) - 4)
            if self._greeting is None:
                await self._begin(size + start)
            writer.write(self._greeting)
            while (question := await reader.read(65_536)) and question[:1] != b"X":  # good-bye: the session stays
                self._asking = writer
                self._session.write(question)
        writer.close()

    async def _begin(self, start: bytes) -> None:
        server, self._session = await asyncio.open_unix_connection(self._socket)
        self._session.write(start)
        greeting = b""
        while greeting[-6:-1] != b"Z\x00\x00\x00\x05":
            greeting += await server.read(65_536)
        self._greeting = _of_another_process(greeting)
        self._answering = asyncio.create_task(self._answer(server))

    async def _answer(self, server: asyncio.StreamReader) -> None:
        while answer := await server.read(65_536):
            assert self._asking is not None
            self._asking.write(answer)

    async def close(self) -> None:
        if self._answering is not None:
            self._session.close()
            await self._session.wait_closed()
            await self._answering


def _of_another_process(greeting: bytes) -> bytes:
    """The greeting, with the number of a process that is not the session's, as poolers give it."""
    at = greeting.index(b"K\x00\x00\x00\x0c")
    return greeting[: at + 5] + (1).to_bytes(4) + greeting[at + 9 :]


async def test_a_pooler_that_shares_a_session_among_connections_is_refused(url: str) -> None:
    folder = parse_qs(urlsplit(url).query)["host"][0]
    pooler = Pooler(f"{folder}/.s.PGSQL.5432")
    serving = await asyncio.start_server(pooler.serve, "127.0.0.1", 0)
    port = serving.sockets[0].getsockname()[1]
    try:
        with pytest.raises(StoreUnavailable, match="pool_mode = session"):
            await PostgresDatabase.open(f"postgresql://postgres:x@127.0.0.1:{port}/postgres?sslmode=disable")
    finally:
        serving.close()
        await pooler.close()
