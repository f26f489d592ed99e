"""INV 23: one unreadable row harms no other row, in any table, on both databases.

For each table, rows are made as a server makes them, and each is damaged in one column: values of every wrong kind that
the database accepts. Then a server is started over them. Other runs and chats complete, lists are complete, reading a
damaged thing is a typed error, runs that cannot be worked on end as failed, `/ready` names the rows, and the next start
works as well. The tables and columns are those of the schema: a new table without a case here fails the first test.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any, NamedTuple

import httpx2
import pytest

from penstock.chat.conversation import ChatMessage
from penstock.chat.ports import Attachment, ChatRecord
from penstock.chat.service import ChatService
from penstock.containment.ledger import Amounts, LedgerStore, TicketRequest
from penstock.containment.limits import Limits
from penstock.hosting.audit import AuditRecord
from penstock.hosting.host import HostSettings, RunHost
from penstock.hosting.ports import (
    ENDED,
    UNTIL_ENDED,
    ApprovalRecord,
    CancelRequest,
    CostShare,
    HostedEvent,
    PayloadRecord,
    RunRecord,
    StoreCorrupt,
)
from penstock.nodes import executors as standard_executors
from penstock.runtime.durable.ports import JournalEntry
from penstock.server.app import create_app
from penstock.server.settings import ServerSettings
from penstock.server.tokens import create_token
from penstock.storage import codec
from penstock.storage.migrations import MIGRATIONS, for_sqlite
from penstock.storage.sql import scan
from penstock.storage.sqlite.ledger import SCHEMA as LEDGER_SCHEMA
from penstock.storage.stores import Stores, open_stores
from tests.server.served import CHAT, ECHO, TOKENS, Echo, Served
from tests.soak import SOAK
from tests.storage.postgres import postgres_server, postgres_url

__all__ = ["postgres_server", "postgres_url"]

pytestmark = pytest.mark.reliability

SETTINGS = HostSettings(tick_s=0.02, lease_s=30, drain_s=0, max_queued=10_000)
HUGE = 1_000_000
NOT_UTF8 = b'"\x80\xff"'
"""Stands for text that is not UTF-8, which only SQLite can be made to store."""
TEXTS = ("", "{", "7", "[]", "[" * 100_000, NOT_UTF8, None)
TEXTS += ("{}", "NaN", "1e999", '"cut', '"\\ud800', "x" * HUGE) if SOAK else ("NaN",)
NUMBERS = (-1, codec.MAX_NUMBER, codec.MIN_NUMBER, None)
LISTS = (
    *("/api/runs", "/api/graphs", "/api/chats", "/api/approvals", "/api/tokens", "/api/money", "/api/bills"),
    *("/v1/models", "/"),
)
READ_LIMIT = 100
NEVER_OLD_MS = 4_000_000_000_000
"""A time in the future: payloads older than their retention are removed when a server starts."""
PATIENCE = 400


class Row(NamedTuple):
    """A row to damage."""

    key: Mapping[str, Any]
    """The columns by which it is found; they are not damaged."""
    path: str | None = None
    """The route that shows it."""
    run_id: str | None = None
    """A run that needs it, and is queued."""


Make = Callable[[Stores, int], Awaitable[Row]]


async def queued(stores: Stores, n: int, graph_id: str = "echo") -> str:
    run_id = f"run{n}"
    await stores.runs.add(RunRecord(run_id, "ann", graph_id, 1, "x", origin={"kind": "run"}, created_ms=n))
    await stores.events.append(run_id, 0, [HostedEvent(1, n, "run.queued")])
    return run_id


async def a_run(stores: Stores, n: int) -> Row:
    run_id = await queued(stores, n)
    return Row({"id": run_id}, f"/api/runs/{run_id}", run_id)


async def an_event(stores: Stores, n: int) -> Row:
    run_id = await queued(stores, n)
    return Row({"run_id": run_id, "seq": 1}, f"/api/runs/{run_id}/export", run_id)


async def an_entry(stores: Stores, n: int) -> Row:
    run_id = await queued(stores, n)
    await stores.journal.append(run_id, [JournalEntry("out", "node", "done")])
    return Row({"run_id": run_id, "key": "out"}, f"/api/runs/{run_id}/export", run_id)


async def a_graph(stores: Stores, n: int) -> Row:
    await stores.graphs.save(f"g{n}", "ann", f"g{n}", ECHO, now_ms=1)
    return Row({"id": f"g{n}"}, f"/api/graphs/g{n}", await queued(stores, n, f"g{n}"))


async def a_version(stores: Stores, n: int) -> Row:
    await stores.graphs.save(f"v{n}", "ann", f"v{n}", ECHO, now_ms=1)
    return Row({"id": f"v{n}", "version": 1}, f"/api/graphs/v{n}", await queued(stores, n, f"v{n}"))


async def a_layout(stores: Stores, n: int) -> Row:
    await stores.graphs.save(f"l{n}", "ann", f"l{n}", ECHO, now_ms=1)
    await stores.graphs.arrange(f"l{n}", {"in": {"x": n, "y": 0}})
    return Row({"id": f"l{n}"}, f"/api/graphs/l{n}/layout")


async def an_approval(stores: Stores, n: int) -> Row:
    run_id = await queued(stores, n)
    await stores.approvals.ask(ApprovalRecord(f"ap{n}", run_id, "ann", "k", "n", "May it?", asked_ms=n))
    return Row({"id": f"ap{n}"}, f"/api/approvals/ap{n}", run_id)


async def a_payload(stores: Stores, n: int) -> Row:
    run_id = await queued(stores, n)
    await stores.payloads.put(
        run_id, [PayloadRecord(run_id, "n000001", 0, "redacted", "question", "answer", NEVER_OLD_MS)]
    )
    return Row({"run_id": run_id, "call_id": "n000001"}, f"/api/runs/{run_id}/calls/n000001", run_id)


async def a_share(stores: Stores, n: int) -> Row:
    run = RunRecord(await queued(stores, n), "ann", "echo", 1, created_ms=NEVER_OLD_MS, cost_nanos=5)
    await stores.spending.record(run, [CostShare("a", "m", 1, 5)])
    return Row({"run_id": run.id})


async def a_token(stores: Stores, n: int) -> Row:
    token, _ = create_token(f"carl{n}", "user", by="root", now_ms=n)
    await stores.tokens.add(token)
    return Row({"id": token.id})


async def a_cancel(stores: Stores, n: int) -> Row:
    run_id = await queued(stores, n)
    await stores.cancels.put(CancelRequest(run_id, "enough", "ann", n, UNTIL_ENDED, "ann"))
    return Row({"run_id": run_id}, f"/api/runs/{run_id}", run_id)


async def a_chat(stores: Stores, n: int) -> Row:
    await stores.chats.create(ChatRecord(f"c{n}", "ann", "Talk", "chat", n, n))
    await stores.chats.add_messages(f"c{n}", [ChatMessage("m", None, "user", "hello", 1)], now_ms=n)
    return Row({"id": f"c{n}"}, f"/api/chats/c{n}")


async def a_message(stores: Stores, n: int) -> Row:
    await a_chat(stores, n)
    return Row({"chat_id": f"c{n}", "id": "m"}, f"/api/chats/c{n}")


async def an_attachment(stores: Stores, n: int) -> Row:
    await stores.chats.attach(Attachment(f"f{n}", "ann", "a.txt", "text/plain", 1, n), b"x")
    return Row({"id": f"f{n}"}, f"/api/attachments/f{n}")


async def an_audit_record(stores: Stores, n: int) -> Row:
    await stores.audit.append(AuditRecord(f"a{n}", NEVER_OLD_MS, "ann", "run.cancel"))
    return Row({"id": f"a{n}"})


async def a_mark(stores: Stores, n: int) -> Row:
    await a_chat(stores, n)
    await stores.chats.mark(f"k{n}", f"c{n}", "m")
    return Row({"key": f"k{n}"})


async def a_use(stores: Stores, n: int) -> Row:
    await an_attachment(stores, n)
    return Row({"attachment_id": f"f{n}"})


async def a_memory(stores: Stores, n: int) -> Row:
    await stores.memories.put("shared", f"key{n}", "word")
    return Row({"key": f"key{n}"})


async def a_space(stores: Stores, n: int) -> Row:
    await stores.memories.put(f"space{n}", "key", "word")
    return Row({"space": f"space{n}"})


async def a_word(stores: Stores, n: int) -> Row:
    await stores.memories.put("shared", f"key{n}", f"word{n}")
    return Row({"word": f"word{n}"})


async def an_identity(stores: Stores, n: int) -> Row:
    await stores.runs.database_id()
    return Row({"number": 1})


MAKERS: Mapping[str, Make] = {
    "runs": a_run,
    "events": an_event,
    "journal": an_entry,
    "graphs": a_graph,
    "graph_versions": a_version,
    "graph_layouts": a_layout,
    "approvals": an_approval,
    "payloads": a_payload,
    "spending": a_share,
    "tokens": a_token,
    "audit": an_audit_record,
    "cancels": a_cancel,
    "chats": a_chat,
    "messages": a_message,
    "attachments": an_attachment,
    "chat_marks": a_mark,
    "attachment_uses": a_use,
    "memories": a_memory,
    "memory_spaces": a_space,
    "memory_words": a_word,
    "database_identity": an_identity,
}


def schema() -> dict[str, dict[str, str]]:
    """Every table of the newest schema: its columns and their types."""
    with closing(sqlite3.connect(":memory:")) as connection:
        for version in MIGRATIONS:
            for statement in version:
                connection.execute(for_sqlite(statement))
        return _tables(connection)


def _tables(connection: sqlite3.Connection) -> dict[str, dict[str, str]]:
    tables = [name for (name,) in connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")]
    columns = {table: connection.execute(f"PRAGMA table_info({table})").fetchall() for table in tables}
    return {table: {row[1]: row[2] for row in rows} for table, rows in columns.items()}


def test_every_table_has_a_row_to_damage_and_a_check() -> None:
    tables = set(schema())
    assert tables == set(MAKERS)
    assert tables == {check.table for check in scan.CHECKS} | scan.PLAIN


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "postgres":
        return str(request.getfixturevalue("postgres_url"))
    return str(tmp_path / "penstock.db")


@pytest.mark.timeout(180)
@pytest.mark.parametrize("table", MAKERS)
async def test_unreadable_rows_harm_no_others(url: str, table: str) -> None:
    async with await open_stores(url) as stores:
        await stores.graphs.save("echo", "ann", "echo", ECHO, now_ms=1)
        await stores.graphs.save("chat", "ann", "chat", CHAT, now_ms=1)
        damaged = [row async for row in _damaged(stores, url, table)]
    assert damaged
    found: set[str] = set()
    for _ in range(2):  # the second time over what the first server left
        async with await open_stores(url) as stores, _server(stores) as server, server.client("root") as root:
            await _bystanders_complete(server)
            # Of another status it may have ended already, and a run with a queue is left to an engine.
            kept = {"status", "queue"}
            await _runs_end(stores, url, [row.run_id for row, column in damaged if row.run_id and column not in kept])
            await _lists_are_complete(root)
            await _reads_are_typed(root, damaged)
            found = {f"{error.table}" for error in await stores.check_rows()}
            ready = (await root.get("/ready")).json()
            assert (ready["status"], set(ready["unreadable"])) == ("degraded" if found else "ready", found)
            assert {row["table"] for row in ready["rows"] or ()} == found
            assert server.host.stats()["totals"].get("host_failures", 0) == 0
            await _bystanders_complete(server)
    assert found == (set() if table in scan.PLAIN else {table}) or table == "cancels"


async def test_only_admins_see_which_rows_are_unreadable(tmp_path: Path) -> None:
    url = str(tmp_path / "penstock.db")
    async with await open_stores(url) as stores, _server(stores) as server:
        await a_chat(stores, 1)
        await _execute(url, "UPDATE chats SET title = 'plain'")
        async with server.client() as anonymous, server.client("root") as root:
            assert (await root.get("/api/chats/c1")).json()["error"]["code"] == "unreadable_row"
            assert (await anonymous.get("/ready")).json() == {
                "status": "degraded", "unreadable": {"chats": 1}, "rows": None,
            }  # fmt: skip
            (row,) = (await root.get("/ready")).json()["rows"]
            assert (row["table"], row["key"]) == ("chats", "c1")
            assert 'penstock_host_unreadable_rows{of="chats"} 1' in (await root.get("/metrics")).text


async def test_a_repaired_row_is_no_longer_reported(tmp_path: Path) -> None:
    url = str(tmp_path / "penstock.db")
    async with await open_stores(url) as stores:
        await a_chat(stores, 1)
        await _execute(url, "UPDATE chats SET title = 'plain'")
        assert [error.key for error in await stores.check_rows()] == ["c1"]
        await _execute(url, "UPDATE chats SET title = '\"Talk\"'")
        assert await stores.check_rows() == []


async def test_saving_an_unreadable_graph_again_repairs_it(url: str) -> None:
    async with await open_stores(url) as stores, _server(stores) as server, server.client("ann") as ann:
        await stores.graphs.save("g", "ann", "g", ECHO, now_ms=1)
        await _execute(url, "UPDATE graph_versions SET document = '['")
        with pytest.raises(StoreCorrupt):
            await stores.graphs.get("g")
        saved = await ann.put("/api/graphs/g", json={"document": ECHO})
        assert (saved.status_code, saved.json()["version"]) == (200, 2)
        run = await server.host.submit(owner="ann", graph_id="g", input="x")
        assert (await server.host.wait(run.id)).status == "completed"


async def test_an_unreadable_run_of_a_chat_lets_the_chat_go_on(url: str) -> None:
    async with await open_stores(url) as stores:
        await stores.graphs.save("chat", "ann", "chat", CHAT, now_ms=1)
        async with _server(stores, is_started=False) as server, server.client("ann") as ann:
            created = await ann.post("/api/chats", json={"graph_id": "chat"})
            chat_id = created.json()["id"]
            begun = await ann.post(f"/api/chats/{chat_id}/messages", json={"content": "hello"})
            assert begun.status_code < 300, begun.text
        await _execute(url, "UPDATE runs SET input = '{'")
        async with _server(stores) as server, server.client("ann") as ann:
            (run,) = await stores.runs.list()
            await _runs_end(stores, url, [run.id])
            (_, answer) = (await ann.get(f"/api/chats/{chat_id}")).json()["messages"]
            assert answer["data"]["state"] == "failed"
            again = await ann.post(f"/api/chats/{chat_id}/messages", json={"content": "hello again"})
            assert again.status_code == 200, again.text
            assert (await server.host.wait(again.json()["run_id"])).status == "completed"


DAMAGED = {
    "accounts": ("name", "bad{}"),
    "holds": ("key", "bad{}"),
    "draws": ("key", "draw{}"),
    "tickets": ("key", "ticket-bad{}"),
}
LEDGER_TABLES = {*DAMAGED, "levels"}
"""Levels are ids of accounts alone, which the database checks."""
KEYS = {"name", "key", "id"}


def ledger_schema() -> dict[str, dict[str, str]]:
    """Every table of the ledger: its columns and their types."""
    with closing(sqlite3.connect(":memory:")) as connection:
        for statement in LEDGER_SCHEMA.statements:
            connection.execute(statement)
        return _tables(connection)


def test_every_table_of_the_ledger_is_damaged() -> None:
    assert set(ledger_schema()) == LEDGER_TABLES


@pytest.mark.timeout(180)
@pytest.mark.parametrize("table", DAMAGED)
async def test_an_unreadable_row_of_the_ledger_harms_no_other_account_or_call(url: str, table: str) -> None:
    """Of three calls that wait for the same budget, one is damaged: the others are admitted when there is room."""
    ledger_url = url if "://" in url else f"{url}.ledger"
    prefix = "penstock_ledger_" if "://" in url else ""
    number = 0
    async with await open_stores(url) as stores:
        ledger = stores.ledger
        for column, kind in ledger_schema()[table].items():
            for value in TEXTS if kind == "TEXT" else NUMBERS:
                number += 1
                damage = {DAMAGED[table][0]: DAMAGED[table][1].format(number)}
                await asyncio.to_thread(_fill_ledger, ledger, number)
                if column not in KEYS:
                    await _damage(ledger_url, f"{prefix}{table}", damage, column, value)
                await asyncio.to_thread(_others_are_admitted, ledger, number)


def _fill_ledger(ledger: LedgerStore, number: int) -> None:
    """A full account with a call that waits, one more that waits behind it, and an account that no run has."""
    ledger.open_account(f"full{number}", Limits(cost_nanos=10))
    ledger.open_account(f"bad{number}", Limits(cost_nanos=10))
    assert ledger.hold(f"bad{number}", f"bad{number}", Amounts(1)) is None
    assert ledger.draw_retry(f"bad{number}", f"draw{number}")
    assert ledger.hold(f"first{number}", f"full{number}", Amounts(10)) is None
    for key in (f"bad{number}", f"good{number}"):
        account = f"full{number}"
        key = f"ticket-{key}" if key.startswith("bad") else key
        assert ledger.join_queue(key, account, Amounts(5), TicketRequest("run", "owner", lease_s=60, max_wait_s=60))


def _others_are_admitted(ledger: LedgerStore, number: int) -> None:
    ledger.settle(f"first{number}", Amounts(0))
    assert f"good{number}" in ledger.held(f"good{number}")
    ledger.settle(f"good{number}", Amounts(5))
    assert ledger.balance(f"full{number}").spent_nanos == 5


async def _damaged(stores: Stores, url: str, table: str) -> AsyncGenerator[tuple[Row, str], None]:
    """Make rows of the table and damage each in one column, with every value that the database accepts there."""
    number = 0
    for column, kind in schema()[table].items():
        values: Sequence[Any] = TEXTS if kind == "TEXT" else NUMBERS if kind == "INTEGER" else ()
        for value in values:
            number += 1
            row = await MAKERS[table](stores, number)
            if column not in row.key and await _damage(url, table, row.key, column, value):
                yield row, column


async def _damage(url: str, table: str, key: Mapping[str, Any], column: str, value: Any) -> bool:
    """Overwrite the column; return whether the database accepted the value."""
    where = " AND ".join(f"{name} = {_literal(of)}" for name, of in key.items())
    if value is NOT_UTF8:
        if "://" in url:
            return False
        literal = f"CAST(x'{NOT_UTF8.hex()}' AS TEXT)"
    else:
        literal = _literal(value)
    return await _execute(url, f"UPDATE {table} SET {column} = {literal} WHERE {where}")


def _literal(value: Any) -> str:
    if value is None:
        return "NULL"
    return str(value) if isinstance(value, int) else "'" + value.replace("'", "''") + "'"


async def _execute(url: str, statement: str) -> bool:
    return bool(await _query(url, statement) is not None)


async def _query(url: str, statement: str) -> list[Any] | None:
    """Run a statement past all stores; None if the database refuses it."""
    if "://" not in url:
        return await asyncio.to_thread(_query_sqlite, url, statement)
    import asyncpg  # type: ignore[import-untyped]  # only where a server is used

    connection = await asyncpg.connect(url)
    try:
        return [tuple(row) for row in await connection.fetch(statement)]
    except (asyncpg.IntegrityConstraintViolationError, asyncpg.DataError, asyncpg.SyntaxOrAccessError):
        return None
    finally:
        await connection.close()


def _query_sqlite(path: str, statement: str) -> list[Any] | None:
    with closing(sqlite3.connect(path)) as file, file:
        file.execute("PRAGMA foreign_keys = ON")
        file.text_factory = lambda raw: raw.decode("utf-8", "replace")
        try:
            return file.execute(statement).fetchall()
        except sqlite3.IntegrityError:
            return None


@asynccontextmanager
async def _server(stores: Stores, *, is_started: bool = True) -> AsyncGenerator[Served, None]:
    executors = {**await asyncio.to_thread(standard_executors), "echo": Echo()}
    host = RunHost(stores, executors=executors, settings=SETTINGS)
    chats = ChatService(host, stores.chats)
    app = create_app(host, chats, stores, ServerSettings(tokens=TOKENS))
    if is_started:
        await host.start()
    try:
        yield Served(app, host, chats, stores, None)  # type: ignore[arg-type]
    finally:
        await host.close()


async def _bystanders_complete(server: Served) -> None:
    async with server.client("bob") as bob:
        run = await server.host.submit(owner="bob", graph_id="echo", input="mine")
        assert (await server.host.wait(run.id)).output == "mine"
        talk = await bob.post("/api/agents/chat/chat", json={"content": "hello"})
        assert talk.status_code == 200, talk.text
        assert (await server.host.wait(talk.json()["run_id"])).status == "completed"
        memories = server.host.services["memory"]
        await memories.put("shared", "own", "word of bob")
        assert (await memories.search("shared", "bob"))[0].value == "word of bob"


async def _runs_end(stores: Stores, url: str, run_ids: Sequence[str]) -> None:
    """Wait until the runs that need a damaged row are over, one way or another."""
    left = set(run_ids)
    for _ in range(PATIENCE):
        rows = await _query(url, "SELECT id, status FROM runs")
        left -= {id for id, status in rows or () if status in ENDED}
        if not left:
            return
        await stores.events.wait(min(left), codec.MAX_NUMBER - 1, 0.05)
    raise AssertionError(
        f"these runs never end: {await _query(url, f'SELECT * FROM runs WHERE id = {_literal(min(left))}')}"
    )


async def _lists_are_complete(client: httpx2.AsyncClient) -> None:
    for path in LISTS:
        answer = await client.get(path)
        assert answer.status_code == 200, (path, answer.text[:500])
    seen, before = 0, ""
    while True:  # page by page, so that damaged rows are cursors too
        page = (await client.get(f"/api/runs?limit=7{before}")).json()
        seen += len(page["runs"])
        if page["next"] is None:
            break
        before = f"&before={page['next']}"
    assert seen >= 2


async def _reads_are_typed(client: httpx2.AsyncClient, damaged: Sequence[tuple[Row, str]]) -> None:
    """A damaged thing is shown, or is a typed error; never an unexpected one."""
    for row, column in damaged[:READ_LIMIT]:
        if row.path is None:
            continue
        answer = await client.get(row.path)
        code = None if answer.status_code == 200 else answer.json()["error"]["code"]
        assert code != "internal", (row, column, answer.text[:500])
