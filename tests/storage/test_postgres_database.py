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
from penstock.storage.port import Transaction
from penstock.storage.postgres import database as postgres_database
from penstock.storage.postgres import listener
from penstock.storage.postgres.database import ERRORS, PostgresDatabase, numbered, unavailable, without_password
from tests.storage.postgres import postgres_schemas, postgres_server

__all__ = ["postgres_schemas", "postgres_server"]

LISTENED = (
    "SELECT count(*) FROM pg_locks JOIN pg_database ON pg_database.oid = database "
    "WHERE locktype = 'advisory' AND datname = current_database()"
)
MAKE = "CREATE TABLE IF NOT EXISTS notes (id BIGINT PRIMARY KEY, text TEXT NOT NULL)"


@pytest.fixture
def url(postgres_schemas: Callable[[], str]) -> str:
    return postgres_schemas()


@asynccontextmanager
async def opened(url: str, **options: Any) -> AsyncIterator[PostgresDatabase]:
    database = await PostgresDatabase.open(url, **options)
    try:
        await database.write(lambda transaction: transaction.run(MAKE))
        yield database
    finally:
        await database.close()


def adding(id: int, text: str = "") -> Callable[[Transaction], Any]:
    async def body(transaction: Transaction) -> int:
        transaction.notify("notes")
        return await transaction.run("INSERT INTO notes (id, text) VALUES (?, ?)", id, text)

    return body


async def notes(transaction: Transaction) -> list[int]:
    return [row[0] for row in await transaction.rows("SELECT id FROM notes ORDER BY id")]


async def cut_all(url: str) -> None:
    """End every connection to the server but the one that says so."""
    connection = await asyncpg.connect(url)
    await connection.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
        "WHERE pid <> pg_backend_pid() AND application_name LIKE 'penstock%' AND datname = current_database()"
    )
    await connection.close()


async def test_a_transaction_is_committed_whole_or_not_at_all(url: str) -> None:
    async def refused(transaction: Transaction) -> None:
        await adding(1)(transaction)
        raise Conflict("no")

    async with opened(url) as database:
        with pytest.raises(Conflict):
            await database.write(refused)
        assert await database.read(notes) == []
        assert await database.write(adding(1)) == 1
        assert await database.read(notes) == [1]


async def test_a_read_sees_one_snapshot_and_cannot_write(url: str) -> None:
    async with opened(url) as database:

        async def body(transaction: Transaction) -> list[list[int]]:
            before = await notes(transaction)
            await database.write(adding(1))
            return [before, await notes(transaction)]

        assert await database.read(body) == [[], []]
        with pytest.raises(StoreUnavailable, match="read-only"):
            await database.read(adding(2))


async def test_deadlocked_transactions_are_retried_until_both_succeed(url: str) -> None:
    meeting: set[int] = set()
    met = asyncio.Event()

    def crossing(first: int, second: int) -> Callable[[Transaction], Any]:
        async def body(transaction: Transaction) -> None:
            await transaction.run("UPDATE notes SET text = text || 'x' WHERE id = ?", first)
            meeting.add(first)
            if len(meeting) == 2:
                met.set()
            await met.wait()
            await transaction.run("UPDATE notes SET text = text || 'x' WHERE id = ?", second)

        return body

    async with opened(url) as database:
        for id in (1, 2):
            await database.write(adding(id))
        await asyncio.gather(database.write(crossing(1, 2)), database.write(crossing(2, 1)))
        rows = await database.read(lambda transaction: transaction.rows("SELECT text FROM notes ORDER BY id"))
        assert [row[0] for row in rows] == ["xx", "xx"]


async def test_lost_connections_are_opened_again(url: str) -> None:
    async with opened(url) as database:
        await asyncio.gather(*(database.write(adding(id)) for id in range(10)))
        for id in range(10, 13):
            await cut_all(url)
            await database.write(adding(id))
            await cut_all(url)
            assert len(await database.read(notes)) == id + 1


async def test_a_transaction_whose_connection_is_lost_before_the_commit_is_retried(url: str) -> None:
    async with opened(url) as database:
        times = 0

        async def body(transaction: Transaction) -> None:
            nonlocal times
            times += 1
            await adding(1)(transaction)
            if times == 1:
                await cut_all(url)
                await notes(transaction)

        await database.write(body)
        assert (times, await database.read(notes)) == (2, [1])


async def test_locks_of_a_stopped_process_are_released_after_a_timeout(url: str) -> None:
    locked, goes_on = asyncio.Event(), asyncio.Event()

    async def stops(transaction: Transaction) -> int:
        await transaction.run("UPDATE notes SET text = text || 'mine ' WHERE id = 1")
        locked.set()
        await goes_on.wait()
        return await transaction.run("UPDATE notes SET text = text || 'still' WHERE id = 1")

    async with opened(url) as database:
        stopped = await PostgresDatabase.open(url, timeout_s=0.3)
        for id in (1, 2):  # also on a connection that was used before
            await stopped.write(adding(id))
        working = asyncio.create_task(stopped.write(stops))
        await locked.wait()
        assert (
            await database.write(lambda transaction: transaction.run("UPDATE notes SET text = 'taken ' WHERE id = 1"))
            == 1
        )
        goes_on.set()
        assert await working == 1  # run again, from its beginning
        row = await database.read(lambda transaction: transaction.row("SELECT text FROM notes WHERE id = 1"))
        await stopped.close()
    assert row is not None
    assert row[0] == "taken mine still"


async def test_a_cancelled_transaction_leaves_nothing_half_done_and_no_connection_in_use(url: str) -> None:
    async with opened(url) as database:
        begun, never = asyncio.Event(), asyncio.Event()

        async def body(transaction: Transaction) -> None:
            await adding(1)(transaction)
            begun.set()
            await never.wait()

        for _ in range(12):  # more than there are connections
            begun.clear()
            leaving = asyncio.ensure_future(database.write(body))
            await begun.wait()
            leaving.cancel()
            await asyncio.wait((leaving,))
        assert await database.read(notes) == []


async def test_waiters_get_notifications_of_other_processes_even_after_a_lost_connection(url: str) -> None:
    async with opened(url) as database, opened(url) as other:
        for id in range(1, 4):
            while len(await database.read(notes)) < id:
                seen = database.version
                if len(await other.read(notes)) < id:
                    await other.write(adding(id))
                await database.wait("notes", seen, 60)
            await cut_all(url)


async def test_waiters_are_woken_without_polling_even_for_notifications_missed_while_reconnecting(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres_database, "POLL_INTERVAL_S", 600)
    async with opened(url) as database, opened(url) as other:
        await database.wait("notes", database.version, 600)  # it listens from now on
        for id in (1, 2):
            seen = database.version
            await other.write(adding(id))
            await database.wait("notes", seen, 600)
            assert (await database.read(notes))[-1] == id
        seen = database.version
        await cut_all(url)
        await other.write(adding(3))
        await database.wait("notes", seen, 600)
        assert (await database.read(notes))[-1] == 3


def recorded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The statements without a result from now on: those that begin, end and reset are among them."""
    execute, statements = asyncpg.Connection.execute, list[str]()

    async def recording(connection: Any, query: str, *args: Any, **options: Any) -> Any:
        statements.append(query)
        return await execute(connection, query, *args, **options)

    monkeypatch.setattr(asyncpg.Connection, "execute", recording)
    return statements


async def test_a_read_of_one_statement_needs_no_transaction_and_no_reset(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(url) as database:
        await database.write(adding(1))
        statements = recorded(monkeypatch)
        assert await database.read(notes, single=True) == [1]
        assert statements == []
        await database.read(notes)
        assert statements == [postgres_database.BEGIN_READ, "COMMIT"]


async def test_a_read_that_turns_out_to_need_two_statements_is_started_again_in_one_snapshot(url: str) -> None:
    async with opened(url) as database:
        times = 0

        async def body(transaction: Transaction) -> list[list[int]]:
            nonlocal times
            times += 1
            before = await notes(transaction)
            await database.write(adding(times))
            return [before, await notes(transaction)]

        assert await database.read(body, single=True) == [[1], [1]]
        assert times == 2
        with pytest.raises(StoreUnavailable, match="read-only"):
            await database.read(adding(3), single=True)


async def test_many_rows_are_written_by_one_statement_in_their_order(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    insert = "INSERT INTO many (name, data, at) VALUES (?, ?, ?) ON CONFLICT (name) DO NOTHING"
    rows = [(f"n{at}", None if at % 3 else b"\x00\xff", -at) for at in range(50)]

    async def fill(transaction: Transaction) -> None:
        await transaction.run(
            "CREATE TABLE many (number BIGSERIAL, name TEXT PRIMARY KEY, data BYTEA, at BIGINT NOT NULL)"
        )
        await transaction.run_many(insert, [rows[7]])
        await transaction.run_many(insert, rows)
        await transaction.run_many("UPDATE many SET at = ?, data = ? WHERE name = ?", [(9, None, "n1"), (8, b"", "n2")])
        await transaction.run_many("DELETE FROM many WHERE name = ?", [("n3",), ("n4",)])

    async with opened(url) as database:
        statements = recorded(monkeypatch)
        await database.write(fill)
        assert len([one for one in statements if " unnest(" in one]) == 2
        found = await database.read(
            lambda transaction: transaction.rows("SELECT name, data, at FROM many ORDER BY number")
        )
    changed = {"n1": ("n1", None, 9), "n2": ("n2", b"", 8)}
    kept = [rows[7], *(row for row in rows if row[0] not in ("n3", "n4", "n7"))]
    assert [tuple(row) for row in found] == [changed.get(row[0], row) for row in kept]


async def test_a_connection_that_a_full_server_refuses_is_requested_again(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect, refusals = asyncpg.Connection.fetch, iter([True, True])

    async def full(connection: Any, query: str, *args: Any, **options: Any) -> Any:
        if next(refusals, False):
            raise asyncpg.TooManyConnectionsError("sorry, too many clients already")
        return await connect(connection, query, *args, **options)

    async with opened(url) as database:
        monkeypatch.setattr(asyncpg.Connection, "fetch", full)
        assert await database.read(notes) == []


async def test_a_caller_waits_for_a_connection_as_long_as_a_statement_may_take(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(url, connections=1, timeout_s=20) as database:
        monkeypatch.setattr(postgres_database, "CONNECT_S", 0.05)
        is_begun, may_end = asyncio.Event(), asyncio.Event()

        async def keeps_it(transaction: Any) -> None:
            is_begun.set()
            await may_end.wait()

        keeper = asyncio.create_task(database.write(keeps_it))
        await is_begun.wait()
        waiting = [asyncio.create_task(database.read(notes)) for _ in range(5)]
        await asyncio.wait(waiting, timeout=0.2)
        assert not any(task.done() for task in waiting)
        may_end.set()
        await keeper
        assert await asyncio.gather(*waiting) == [[]] * 5


async def test_no_notification_is_sent_where_no_process_listens(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "LINGER_S", 0.05)
    heard: list[object] = []
    spy = await asyncpg.connect(url)
    await spy.add_listener(f"{listener.CHANNEL}_{listener.channel_of('notes')}", lambda *about: heard.append(about[-1]))
    async with opened(url) as database, opened(url) as other:
        await other.write(adding(1))
        waiting = asyncio.ensure_future(database.wait("notes", database.version, 60))
        await waiting  # it listens from now on
        waiting = asyncio.ensure_future(database.wait("notes", database.version, 60))
        await asyncio.sleep(0)
        await other.write(adding(2))
        await waiting
        await spy.execute("SELECT 1")
        assert heard == ["notes"]
        while await spy.fetchval(f"{LISTENED} AND classid = {listener.LOCK_CLASS}"):  # noqa: ASYNC110  the server's
            await asyncio.sleep(0.01)  # it stops listening after a while
        await other.write(adding(3))
        await spy.execute("SELECT 1")
    await spy.close()
    assert heard == ["notes"]


async def test_a_change_that_is_committed_while_a_process_begins_to_listen_is_not_missed(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres_database, "POLL_INTERVAL_S", 600)

    async with opened(url) as writer:
        for id in range(1, 16):
            async with opened(url) as reader:

                async def found(reader: PostgresDatabase = reader, id: int = id) -> None:
                    while True:
                        seen = reader.version
                        if id in await reader.read(notes, single=True):
                            return
                        await reader.wait("notes", seen, 600)

                async def later(id: int = id) -> None:
                    await asyncio.sleep(id * 0.002)
                    await writer.write(adding(id))

                await asyncio.wait_for(asyncio.gather(found(), later()), 30)


async def test_a_transaction_whose_commit_was_not_confirmed_is_reported_and_not_retried(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    execute, times = asyncpg.Connection.execute, 0

    async def commit_unheard(connection: Any, query: str, *args: Any, **options: Any) -> Any:
        answer = await execute(connection, query, *args, **options)
        if query == "COMMIT":
            raise ConnectionResetError("the answer was lost")
        return answer

    async def body(transaction: Transaction) -> None:
        nonlocal times
        times += 1
        await adding(times)(transaction)

    async with opened(url) as database:
        with monkeypatch.context() as patch:
            patch.setattr(asyncpg.Connection, "execute", commit_unheard)
            with pytest.raises(StoreUnavailable, match=r"the answer was lost .* then try again"):
                await database.write(body)
        assert (times, await database.read(notes)) == (1, [1])
        await database.write(body)
        assert await database.read(notes) == [1, 2]


async def test_a_closed_database_refuses_operations_and_wakes_waiters(url: str) -> None:
    async with opened(url) as database:
        waiting = asyncio.ensure_future(database.wait("notes", database.version, 60))
        await asyncio.sleep(0)
        await database.close()
        await waiting
        for late in (database.write(adding(1)), database.read(notes), database.wait("notes", 0, 1)):
            with pytest.raises(StoreUnavailable, match="closed"):
                await late


async def test_an_unreachable_server_is_reported_without_the_password() -> None:
    with pytest.raises(StoreUnavailable, match="see whether the server runs") as raised:
        await PostgresDatabase.open("postgresql://ann:secret@127.0.0.1:1/penstock?sslmode=disable")
    assert "secret" not in str(raised.value)
    assert "ann@127.0.0.1:1/penstock" in str(raised.value)


async def test_an_unknown_database_is_reported(postgres_server: str) -> None:
    with pytest.raises(StoreUnavailable, match="make the database first"):
        await PostgresDatabase.open(postgres_server % "nowhere")


def test_an_invalid_url_is_reported_without_the_password() -> None:
    with pytest.raises(InvalidValue) as raised:
        without_password("mysql://ann:secret@host/x")
    assert "secret" not in str(raised.value)


def test_statements_are_numbered() -> None:
    assert numbered("a = ? AND b IN (?, ?)") == "a = $1 AND b IN ($2, $3)"


@pytest.mark.parametrize("kind", [asyncpg.InvalidSQLStatementNameError, asyncpg.DuplicatePreparedStatementError])
def test_missing_prepared_statements_are_reported_as_a_pooler(kind: type[Exception]) -> None:
    assert isinstance(kind("x"), ERRORS)
    assert "pool_mode = session" in str(unavailable("here", kind("x")))


class Pooler:
    """Puts all who connect on one session of the server, as a pooler does that gives out connections by transaction.

    Answers go to the last client that sent something: for clients that take turns.
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


@pytest.mark.parametrize("reads", [False, True], ids=["write", "read"])
@pytest.mark.parametrize("statement", ["BEGIN", "SELECT pg_sleep", "COMMIT", "ROLLBACK"])
async def test_cancelled_transaction_is_rolled_back_before_its_connection_is_released(
    url: str, monkeypatch: pytest.MonkeyPatch, statement: str, reads: bool
) -> None:
    """asyncpg reports a connection that is released in a transaction to the loop's exception handler."""
    execute, reported = asyncpg.Connection.execute, []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda loop, context: reported.append(context["message"]))

    async def body(transaction: Transaction) -> None:
        await transaction.run("SELECT pg_sleep(0.01)")
        if statement == "ROLLBACK":
            raise Conflict("rolled back")

    async def execute_and_cancel(connection: Any, query: str, *args: Any, **options: Any) -> Any:
        if query.startswith(statement):
            loop.call_soon(caller.cancel)  # once it has been sent, and before it is answered
            loop.call_soon(lambda: loop.call_soon(caller.cancel))  # and again while it is cleaned up
        return await execute(connection, query, *args, **options)

    database = await PostgresDatabase.open(url, connections=1)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(asyncpg.Connection, "execute", execute_and_cancel)
            caller = asyncio.ensure_future(database.read(body) if reads else database.write(body))
            with pytest.raises(asyncio.CancelledError):
                await caller
        assert await database.read(lambda transaction: transaction.row("SELECT 1"))  # on the same connection
        assert reported == []
    finally:
        await database.close()
