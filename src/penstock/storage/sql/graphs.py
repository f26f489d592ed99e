"""SQL store of graphs, with every version of each."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.hosting.ports import Conflict, GraphHead, GraphRecord, StoreCorrupt
from penstock.storage import codec
from penstock.storage.port import Row, SqlStore, TableCheck, Transaction, Value
from penstock.storage.rules import check_expected_version, merge_positions, search_key

VERSIONS = "FROM graphs JOIN graph_versions ON graph_versions.id = graphs.id"
COLUMNS = "version, owner, name, document, digest, created_ms, is_archived, saved_by, note"
SELECT = f"SELECT graphs.id, {COLUMNS} {VERSIONS}"
SELECT_HEAD = f"SELECT graphs.id, version, owner, is_archived {VERSIONS}"
SELECT_TEXT = f"SELECT document {VERSIONS}"
OF_NEWEST = "AND graph_versions.version = graphs.newest"
SELECT_NEWEST = f"{SELECT} {OF_NEWEST}"
INSERT = "INSERT INTO graphs (id, owner, newest, is_archived) VALUES (?, ?, 0, 0) ON CONFLICT (id) DO NOTHING"
INSERT_VERSION = (
    "INSERT INTO graph_versions (id, version, name, document, digest, created_ms, saved_by, note) "
    "VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
)

SELECT_LAYOUT = "SELECT id, positions FROM graph_layouts WHERE id = ?"
PUT_LAYOUT = (
    "INSERT INTO graph_layouts (id, positions) VALUES (?, ?) "
    "ON CONFLICT (id) DO UPDATE SET positions = excluded.positions"
)


class SqlGraphStore(SqlStore):
    """A `GraphStore` over a database."""

    async def save(
        self,
        graph_id: str,
        owner: str,
        name: str,
        document: Mapping[str, Any],
        *,
        now_ms: int,
        expected_version: int | None = None,
        saved_by: str = "",
        note: str = "",
        source: str = "",
    ) -> GraphRecord:
        codec.name("id", graph_id), codec.name("owner", owner)
        author = codec.name("saved_by", saved_by) if saved_by else "", codec.encode_text("note", note)
        encoded = codec.encode_source("document", document, source)
        digest = hashlib.sha256(codec.canonical("document", document).encode()).hexdigest()
        content = codec.encode_text("name", name), encoded, digest

        async def body(transaction: Transaction) -> GraphRecord:
            await transaction.run(INSERT, graph_id, owner)
            version = await _locked_version(transaction, graph_id, owner)
            newest = await self._readable_version(transaction, graph_id, version) if version else None
            if newest is not None and (newest.name, newest.digest) == (name, digest):
                return newest
            check_expected_version(graph_id, version, expected_version)
            created_ms = codec.number("created_ms", now_ms)
            await transaction.run(INSERT_VERSION, graph_id, version + 1, *content, created_ms, *author)
            await transaction.run("UPDATE graphs SET newest = ? WHERE id = ?", version + 1, graph_id)
            return await _newest_version(transaction, graph_id)

        codec.number("created_ms", now_ms)
        return await self._database.write(body)

    async def get(self, graph_id: str, version: int | None = None) -> GraphRecord | None:
        row = await self._row(SELECT, graph_id, version)
        return None if row is None else _decode(row)

    async def head(self, graph_id: str, version: int | None = None) -> GraphHead | None:
        row = await self._row(SELECT_HEAD, graph_id, version)
        if row is None:
            return None
        id, of_version, owner, is_archived = row
        return GraphHead(id, of_version, owner, bool(is_archived))

    async def source(self, graph_id: str, version: int | None = None) -> str:
        row = await self._row(SELECT_TEXT, graph_id, version)
        return "" if row is None else codec.decode_source(row[0])

    async def list(
        self,
        *,
        owner: str | None = None,
        before: str | None = None,
        limit: int = 100,
        is_archived: bool = False,
        text: str | None = None,
    ) -> Sequence[GraphRecord]:
        where: list[str] = ["is_archived = ?"]
        values: list[Value] = [int(is_archived)]
        for term, value in (("owner = ?", owner), ("graphs.id > ?", before)):
            if value is not None:
                where.append(term)
                values.append(codec.lookup_key(value))
        if text is not None:
            part = "".join(f"!{one}" if one in "!%_" else one for one in search_key(text))
            where.append("(lower(graphs.id) LIKE ? ESCAPE '!' OR lower(name) LIKE ? ESCAPE '!')")
            values.extend([f"%{part}%"] * 2)
        statement = f"{SELECT_NEWEST} WHERE {' AND '.join(where)} ORDER BY graphs.id LIMIT ?"

        async def body(transaction: Transaction) -> Sequence[GraphRecord]:
            return [self._decode_or_mark(row) for row in await transaction.rows(statement, *values, codec.limit(limit))]

        return await self._database.read(body, single=True)

    async def versions(self, graph_id: str) -> Sequence[GraphRecord]:
        statement = f"{SELECT} WHERE graphs.id = ? ORDER BY version DESC"

        async def body(transaction: Transaction) -> Sequence[GraphRecord]:
            return [self._decode_or_mark(row) for row in await transaction.rows(statement, codec.lookup_key(graph_id))]

        return await self._database.read(body, single=True)

    async def _readable_version(self, transaction: Transaction, graph_id: str, version: int) -> GraphRecord | None:
        """Return a version; None if it cannot be read, so that saving the graph again repairs it."""
        row = await transaction.row(f"{SELECT} WHERE graphs.id = ? AND version = ?", graph_id, version)
        readable = self._database.faults.readable([] if row is None else [row], _decode)
        return readable[0] if readable else None

    def _decode_or_mark(self, row: Row) -> GraphRecord:
        """Decode a row for a list; one that cannot be decoded is shown by name as unreadable, without a document."""
        try:
            return _decode(row)
        except StoreCorrupt as error:
            self._database.faults.note(error)
            id, version, owner, _, _, digest, created_ms, is_archived, saved_by, _ = row
            name = codec.unreadable(error)
            return GraphRecord(id, version, owner, name, {}, digest, created_ms, bool(is_archived), saved_by)

    async def _row(self, select: str, graph_id: str, version: int | None) -> Row | None:
        """Return the selected columns of that version, or of the newest if `version` is None."""
        values: list[Value] = [codec.lookup_key(graph_id)]
        if version is None:
            statement = f"{select} {OF_NEWEST} WHERE graphs.id = ?"
        else:
            statement = f"{select} WHERE graphs.id = ? AND version = ?"
            values.append(codec.number("version", version))

        async def body(transaction: Transaction) -> Row | None:
            return await transaction.row(statement, *values)

        return await self._database.read(body, inline=True, single=True)

    async def archive(self, graph_id: str, *, is_archived: bool = True) -> None:
        async def body(transaction: Transaction) -> None:
            statement = "UPDATE graphs SET is_archived = ? WHERE id = ?"
            if not await transaction.run(statement, int(is_archived), codec.lookup_key(graph_id)):
                raise KeyError(f"no graph {graph_id!r}")

        await self._database.write(body)

    async def layout(self, graph_id: str) -> Mapping[str, Any]:
        async def body(transaction: Transaction) -> Mapping[str, Any]:
            row = await transaction.row(SELECT_LAYOUT, codec.lookup_key(graph_id))
            return {} if row is None else _decode_layout(row)

        return await self._database.read(body, single=True)

    async def arrange(self, graph_id: str, positions: Mapping[str, Any]) -> Mapping[str, Any]:
        codec.encode_object("positions", positions)

        async def body(transaction: Transaction) -> Mapping[str, Any]:
            lock = transaction.dialect.update_lock
            key = codec.lookup_key(graph_id)
            if await transaction.row(f"SELECT id FROM graphs WHERE id = ?{lock}", key) is None:
                raise KeyError(f"no graph {graph_id!r}")
            rows = await transaction.rows(SELECT_LAYOUT, key)
            stored = self._database.faults.readable(rows, _decode_layout)  # an unreadable layout is replaced
            merged = merge_positions(stored[0] if stored else {}, positions)
            await transaction.run(PUT_LAYOUT, key, codec.encode_object("positions", merged))
            return merged

        return await self._database.write(body)


async def _locked_version(transaction: Transaction, graph_id: str, owner: str) -> int:
    """Lock the graph and return its newest version, 0 if it has none yet; Conflict if it is another owner's."""
    lock = transaction.dialect.update_lock
    row = await transaction.row(f"SELECT owner, newest FROM graphs WHERE id = ?{lock}", graph_id)
    assert row is not None, "it was made just before"
    if row[0] != owner:
        raise Conflict(f"graph {graph_id!r} is another owner's; save it under an id of its own")
    # Not the number in `graphs`: if that were wrong, the next version number might be taken already.
    newest = await transaction.row("SELECT coalesce(max(version), 0) FROM graph_versions WHERE id = ?", graph_id)
    assert newest is not None, "a maximum is one row"
    return int(newest[0])


async def _newest_version(transaction: Transaction, graph_id: str) -> GraphRecord:
    row = await transaction.row(f"{SELECT_NEWEST} WHERE graphs.id = ?", graph_id)
    if row is None:
        raise StoreCorrupt("graphs", graph_id, "its newest version is not there")
    return _decode(row)


def _decode(row: Row) -> GraphRecord:
    id, version, owner, name, document, digest, created_ms, is_archived, saved_by, note = row
    key = f"{id}/{version}"
    graph_name, content = (
        codec.decode_text("graph_versions", key, name),
        codec.decode_object("graph_versions", key, document),
    )
    why = codec.decode_text("graph_versions", key, note)
    return GraphRecord(id, version, owner, graph_name, content, digest, created_ms, bool(is_archived), saved_by, why)


def _decode_layout(row: Row) -> dict[str, Any]:
    id, positions = row
    return codec.decode_object("graph_layouts", id, positions)


def _decode_newest(row: Row) -> None:
    id, newest, known = row
    if newest != known:
        raise StoreCorrupt("graphs", id, f"its newest version is {newest} here, and {known} among its versions")


CHECKS = (
    TableCheck(
        "graphs",
        "id, newest, (SELECT coalesce(max(version), 0) FROM graph_versions WHERE graph_versions.id = graphs.id)",
        ("id",),
        ("",),
        _decode_newest,
    ),
    TableCheck(
        "graph_versions",
        "id, version, '', name, document, digest, created_ms, 0, saved_by, note",
        ("id", "version"),
        ("", codec.MIN_NUMBER),
        _decode,
    ),
    TableCheck("graph_layouts", "id, positions", ("id",), ("",), _decode_layout),
)
