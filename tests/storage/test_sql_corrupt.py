"""Rows that cannot be decoded are reported by table and key, and everything else can still be read."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.chat.conversation import ChatMessage
from penstock.chat.ports import Attachment, ChatRecord
from penstock.hosting.audit import AuditRecord
from penstock.hosting.ports import ApprovalRecord, CancelRequest, HostedEvent, PayloadRecord, RunRecord
from penstock.runtime.durable.ports import JournalEntry
from penstock.storage import StoreCorrupt, Stores, codec, open_stores

Ask = Callable[[Stores], Awaitable[Any]]
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=5,
)

CASES: list[tuple[str, str, str, Ask]] = [
    ("runs", "r", "status = 'lost'", lambda stores: stores.runs.get("r")),
    ("runs", "r", "input = '{'", lambda stores: stores.runs.get("r")),
    ("runs", "r", "limits = '[]'", lambda stores: stores.runs.get("r")),
    ("runs", "r", "origin = '7'", lambda stores: stores.runs.end("r", "cancelled", now_ms=1)),
    ("runs", "r", f"output = '{'[' * 100_000}'", lambda stores: stores.runs.get("r")),
    ("events", "r/1", "data = ''", lambda stores: stores.events.read("r")),
    ("events", "r/1", "data = 'null'", lambda stores: stores.events.read("r")),
    ("journal", "r/k", "value = 'NaN,'", lambda stores: stores.journal.load("r")),
    ("journal", "r/k", "kind = 'dream'", lambda stores: stores.journal.load("r")),
    ("payloads", "r/n000001", "request = '{'", lambda stores: stores.payloads.get("r", "n000001")),
    ("payloads", "r/n000001", "recording = 'off'", lambda stores: stores.payloads.get("r", "n000001")),
    ("graph_versions", "g/1", "document = '[]'", lambda stores: stores.graphs.get("g")),
    ("chats", "c", "title = 'plain'", lambda stores: stores.chats.get("c")),
    ("messages", "c/m", "role = 'stranger'", lambda stores: stores.chats.messages("c")),
    ("messages", "c/m", "content = '7'", lambda stores: stores.chats.message("c", "m")),
    ("messages", "c/m", "data = '[]'", lambda stores: stores.chats.finish_message("c", "m", "", {}, now_ms=1)),
    ("attachments", "f", "name = 'plain'", lambda stores: stores.chats.attachment("f")),
    ("memories", "chat:c/k", "value = '{'", lambda stores: stores.memories.get("chat:c", "k")),
]


@pytest.mark.parametrize(("table", "key", "change", "ask"), CASES)
async def test_the_error_for_a_corrupt_row_names_it(
    tmp_path: Path, table: str, key: str, change: str, ask: Ask
) -> None:
    path = tmp_path / "penstock.db"
    async with await open_stores(str(path)) as stores:
        await _fill(stores)
        await _change(path, f"UPDATE {table} SET {change}")
        with pytest.raises(StoreCorrupt, match="restore it from a backup") as raised:
            await ask(stores)
        assert (raised.value.table, raised.value.key) == (table, key)
        assert len(str(raised.value)) < 1_000
        await stores.runs.add(RunRecord("another", "ann", "g", 1))
        assert await stores.runs.get("another") is not None


SKIPPED: list[tuple[str, str, str, Ask]] = [
    ("runs", "r", "status = 'lost'", lambda stores: stores.runs.list()),
    ("runs", "r", "error = '7'", lambda stores: stores.runs.claim("w", now_ms=1, lease_ms=1)),
    ("graph_versions", "g/1", "name = '{}'", lambda stores: stores.graphs.list()),
    ("graphs", "g", "newest = 5", lambda stores: stores.graphs.save("g", "ann", "G", {"a": 1}, now_ms=1)),
    ("approvals", "a", "state = 'perhaps'", lambda stores: stores.approvals.wait("a", 0)),
    ("approvals", "a", "question = '7'", lambda stores: stores.approvals.list()),
    ("approvals", "a", "value = ''", lambda stores: stores.approvals.answer("a", "approved", by="b", now_ms=1)),
    ("cancels", "r", "reason = '7'", lambda stores: stores.cancels.find({"r": "ann"}, now_ms=1)),
    ("memories", "chat:c/k", "value = ''", lambda stores: stores.memories.search("chat:c", "")),
    ("memories", "chat:c/k", "value = 'word'", lambda stores: stores.memories.search("chat:c", "word")),
    ("chats", "c", "title = 'plain'", lambda stores: stores.chats.list()),
    ("audit", "a", "details = '[]'", lambda stores: stores.audit.list()),
    ("audit", "a", "source = 'mail'", lambda stores: stores.audit.list()),
]
"""Readers of many rows, and what is safe without the row: they go on, and note it."""


@pytest.mark.parametrize(("table", "key", "change", "ask"), SKIPPED)
async def test_readers_of_many_rows_step_over_a_corrupt_one_and_note_it(
    tmp_path: Path, table: str, key: str, change: str, ask: Ask
) -> None:
    path = tmp_path / "penstock.db"
    async with await open_stores(str(path)) as stores:
        await _fill(stores)
        await _change(path, f"UPDATE {table} SET {change}")
        await ask(stores)
        if table != "graphs":  # saving the graph has repaired it
            assert [(error.table, error.key) for error in stores.faults.rows] == [(table, key)]


@pytest.mark.parametrize(
    ("second", "third"),
    [
        ("{", '{"a": 3}'),
        ('{"a": 2}, {"a": 2}', ""),
        ("[2]", '{"a": 3}'),
        ('{"a": "\ufffd"}', '{"a": 3}'),
        ('{"a": NaN}', '{"a": 3}'),
    ],
)
def test_a_corrupt_object_among_others_is_named(second: str, third: str) -> None:
    texts = ['{"a": 1}', second, third]
    with pytest.raises(StoreCorrupt) as raised:
        codec.decode_objects("events", lambda index: f"r/{index}", texts)
    assert raised.value.key == "r/1"


@given(st.lists(st.dictionaries(st.text(), VALUES)))
def test_objects_that_are_decoded_together_are_those_that_are_decoded_one_by_one(objects: list[dict[str, Any]]) -> None:
    texts = [codec.encode_object("data", each) for each in objects]
    found = codec.decode_objects("events", str, texts)
    assert repr(found) == repr([codec.decode_object("events", "", text) for text in texts]) == repr(objects)


async def test_a_corrupt_run_is_failed_by_the_claim_and_shown_in_the_list(tmp_path: Path) -> None:
    path = tmp_path / "penstock.db"
    async with await open_stores(str(path)) as stores:
        await _fill(stores)
        await stores.runs.add(RunRecord("fine", "ann", "g", 1, created_ms=5))
        await _change(path, "UPDATE runs SET input = '{' WHERE id = 'r'")
        claimed = await stores.runs.claim("w", now_ms=10, lease_ms=1_000)
        assert claimed is not None
        assert claimed.id == "fine"
        shown = {run.id: run for run in await stores.runs.list()}["r"]
        assert (shown.status, shown.ended_ms) == ("failed", 10)
        assert str(shown.error).startswith("StoreCorrupt: the row 'r' of table 'runs' cannot be read")


async def test_columns_refuse_values_of_another_type(tmp_path: Path) -> None:
    path = tmp_path / "penstock.db"
    async with await open_stores(str(path)) as stores:
        await _fill(stores)
        with pytest.raises(sqlite3.IntegrityError):
            await _change(path, "UPDATE runs SET epoch = 'two'")


async def _change(path: Path, statement: str) -> None:
    def change() -> None:
        with closing(sqlite3.connect(path)) as file, file:
            file.execute(statement)

    await asyncio.to_thread(change)


async def _fill(stores: Stores) -> None:
    """One row in every table."""
    await stores.runs.add(RunRecord("r", "ann", "g", 1))
    await stores.events.append("r", 0, [HostedEvent(1, 1, "run.queued")])
    await stores.journal.append("r", [JournalEntry("k", "node", 1)])
    await stores.graphs.save("g", "ann", "G", {}, now_ms=1)
    await stores.approvals.ask(ApprovalRecord("a", "r", "ann", "k", "n", "?"))
    await stores.payloads.put("r", [PayloadRecord("r", "n000001", 0, "full", "question", "answer", 1)])
    await stores.audit.append(AuditRecord("a", 1, "ann", "run.cancel"))
    await stores.cancels.put(CancelRequest("r", "enough", "ann", 1, 2))
    await stores.chats.create(ChatRecord("c", "ann", "", "g", 1, 1))
    await stores.chats.add_messages("c", [ChatMessage("m", None, "user", "hello", 1)], now_ms=1)
    await stores.chats.attach(Attachment("f", "ann", "a", "text/plain", 1, 1), b"x")
    await stores.memories.put("chat:c", "k", "word")
