"""What is in a database, version by version.

A version is a list of statements that take a database from the one before to it. They are written in SQLite's words;
`for_postgres` says the same in PostgreSQL's. A published version is never changed: what comes later is a new one. All
that are missing are run in one transaction, so that a database is of one version or the other, and never between.

SQLite keeps the number in the header of the file, PostgreSQL in the table `penstock_schema`.
"""

from __future__ import annotations

import re

APPLICATION_ID = int.from_bytes(b"PnSt")
"""In the header of a SQLite file: that its tables are these. A ledger's is another."""

RUNS = (
    """CREATE TABLE runs (
        id TEXT NOT NULL PRIMARY KEY,
        owner TEXT NOT NULL,
        graph_id TEXT NOT NULL,
        graph_version BIGINT NOT NULL,
        input TEXT NOT NULL,
        limits TEXT NOT NULL,
        origin TEXT NOT NULL,
        chat_id TEXT,
        status TEXT NOT NULL,
        created_ms BIGINT NOT NULL,
        started_ms BIGINT,
        ended_ms BIGINT,
        worker TEXT,
        lease_until_ms BIGINT NOT NULL,
        epoch BIGINT NOT NULL,
        stop_reason TEXT,
        error TEXT,
        output TEXT NOT NULL,
        cost_nanos BIGINT NOT NULL,
        tokens_in BIGINT NOT NULL,
        tokens_out BIGINT NOT NULL,
        unresolved_nanos BIGINT NOT NULL
    )""",
    "CREATE INDEX runs_by_age ON runs (created_ms, id)",
    "CREATE INDEX runs_by_owner ON runs (owner, created_ms, id)",
    "CREATE INDEX runs_by_chat ON runs (chat_id, created_ms, id) WHERE chat_id IS NOT NULL",
    "CREATE INDEX runs_by_status ON runs (status, owner)",
    # By another word for the status: else SQLite would find open runs by status, and sort all of them for each claim.
    "CREATE INDEX runs_open ON runs (created_ms, id) WHERE coalesce(status, '') IN ('queued', 'running', 'waiting')",
    "CREATE INDEX runs_ended ON runs (ended_ms) WHERE ended_ms IS NOT NULL",
)
EVENTS = (
    """CREATE TABLE events (
        run_id TEXT NOT NULL,
        seq BIGINT NOT NULL,
        at_ms BIGINT NOT NULL,
        type TEXT NOT NULL,
        data TEXT NOT NULL,
        PRIMARY KEY (run_id, seq)
    ) WITHOUT ROWID""",
)
JOURNAL = (
    """CREATE TABLE journal (
        number SERIAL,
        run_id TEXT NOT NULL,
        key TEXT NOT NULL,
        kind TEXT NOT NULL,
        value TEXT NOT NULL,
        cost_nanos BIGINT NOT NULL,
        tokens_in BIGINT NOT NULL,
        tokens_out BIGINT NOT NULL,
        at_ms BIGINT NOT NULL,
        UNIQUE (run_id, key)
    )""",
)
GRAPHS = (
    """CREATE TABLE graphs (
        id TEXT NOT NULL PRIMARY KEY,
        owner TEXT NOT NULL,
        newest BIGINT NOT NULL,
        is_archived BIGINT NOT NULL
    )""",
    """CREATE TABLE graph_versions (
        id TEXT NOT NULL REFERENCES graphs (id),
        version BIGINT NOT NULL,
        name TEXT NOT NULL,
        document TEXT NOT NULL,
        digest TEXT NOT NULL,
        created_ms BIGINT NOT NULL,
        PRIMARY KEY (id, version)
    )""",
)
APPROVALS = (
    """CREATE TABLE approvals (
        id TEXT NOT NULL PRIMARY KEY,
        run_id TEXT NOT NULL,
        owner TEXT NOT NULL,
        key TEXT NOT NULL,
        node_id TEXT NOT NULL,
        question TEXT NOT NULL,
        value TEXT NOT NULL,
        state TEXT NOT NULL,
        answer TEXT NOT NULL,
        reason TEXT NOT NULL,
        asked_ms BIGINT NOT NULL,
        answered_ms BIGINT,
        answered_by TEXT,
        UNIQUE (run_id, key)
    )""",
    "CREATE INDEX approvals_by_owner ON approvals (owner, asked_ms, id)",
    "CREATE INDEX approvals_by_state ON approvals (state, asked_ms, id)",
    """CREATE TABLE cancels (
        run_id TEXT NOT NULL PRIMARY KEY,
        reason TEXT NOT NULL,
        by_whom TEXT NOT NULL,
        at_ms BIGINT NOT NULL,
        until_ms BIGINT NOT NULL
    )""",
)
CHATS = (
    """CREATE TABLE chats (
        id TEXT NOT NULL PRIMARY KEY,
        owner TEXT NOT NULL,
        title TEXT NOT NULL,
        graph_id TEXT NOT NULL,
        created_ms BIGINT NOT NULL,
        updated_ms BIGINT NOT NULL,
        leaf TEXT NOT NULL
    )""",
    "CREATE INDEX chats_by_use ON chats (updated_ms, id)",
    "CREATE INDEX chats_by_owner ON chats (owner, updated_ms, id)",
    """CREATE TABLE messages (
        number SERIAL,
        chat_id TEXT NOT NULL REFERENCES chats (id),
        id TEXT NOT NULL,
        parent_id TEXT NOT NULL,
        role TEXT NOT NULL,
        content TEXT NOT NULL,
        at_ms BIGINT NOT NULL,
        data TEXT NOT NULL,
        is_in_view BIGINT NOT NULL,
        UNIQUE (chat_id, id)
    )""",
    "CREATE INDEX messages_by_parent ON messages (chat_id, parent_id)",
    """CREATE TABLE attachments (
        id TEXT NOT NULL PRIMARY KEY,
        owner TEXT NOT NULL,
        name TEXT NOT NULL,
        media_type TEXT NOT NULL,
        size BIGINT NOT NULL,
        created_ms BIGINT NOT NULL,
        content BLOB NOT NULL
    )""",
)
MEMORIES = (
    """CREATE TABLE memory_spaces (
        number SERIAL,
        space TEXT NOT NULL UNIQUE,
        size BIGINT NOT NULL
    )""",
    """CREATE TABLE memories (
        number SERIAL,
        space BIGINT NOT NULL REFERENCES memory_spaces (number) ON DELETE CASCADE,
        key TEXT NOT NULL,
        value TEXT NOT NULL,
        UNIQUE (space, key)
    )""",
    "CREATE INDEX memories_by_age ON memories (space, number)",
    """CREATE TABLE memory_words (
        space BIGINT NOT NULL,
        word TEXT NOT NULL,
        number BIGINT NOT NULL REFERENCES memories (number) ON DELETE CASCADE,
        PRIMARY KEY (space, word, number)
    ) WITHOUT ROWID""",
    "CREATE INDEX memory_words_by_memory ON memory_words (number)",
)
UNUSED_CHATS = (
    "ALTER TABLE chats ADD COLUMN made_by TEXT NOT NULL DEFAULT ''",
    "CREATE INDEX chats_nobody_made ON chats (updated_ms, id) WHERE made_by <> ''",
    """CREATE TABLE chat_marks (
        key TEXT NOT NULL PRIMARY KEY,
        chat_id TEXT NOT NULL,
        message_id TEXT NOT NULL
    ) WITHOUT ROWID""",
    "CREATE INDEX chat_marks_by_chat ON chat_marks (chat_id)",
    # Beside the chats that refer to it, each attachment has a row without one. Those older than this table have none,
    # and are never removed: who refers to them is not known.
    """CREATE TABLE attachment_uses (
        attachment_id TEXT NOT NULL,
        chat_id TEXT NOT NULL,
        PRIMARY KEY (attachment_id, chat_id)
    ) WITHOUT ROWID""",
    "CREATE INDEX attachment_uses_by_chat ON attachment_uses (chat_id) WHERE chat_id <> ''",
)
UNKNOWN_COSTS = ("ALTER TABLE runs ADD COLUMN unknown_costs BIGINT NOT NULL DEFAULT 0",)
CANCELS_OF_OWNERS = (
    "ALTER TABLE cancels RENAME TO cancels_of_anybody",
    """CREATE TABLE cancels (
        run_id TEXT NOT NULL,
        owner TEXT NOT NULL,
        reason TEXT NOT NULL,
        by_whom TEXT NOT NULL,
        at_ms BIGINT NOT NULL,
        until_ms BIGINT NOT NULL,
        PRIMARY KEY (run_id, owner)
    )""",
    # Whom they were meant for was not written down: they count as they did, for the hour that they are remembered.
    "INSERT INTO cancels SELECT run_id, '', reason, by_whom, at_ms, until_ms FROM cancels_of_anybody",
    "DROP TABLE cancels_of_anybody",
)
EXPECTED_ANSWERS = ("ALTER TABLE approvals ADD COLUMN expects TEXT NOT NULL DEFAULT 'null'",)

MIGRATIONS: tuple[tuple[str, ...], ...] = (
    (*RUNS, *EVENTS, *JOURNAL, *GRAPHS, *APPROVALS, *CHATS),
    MEMORIES,
    (*UNUSED_CHATS, *UNKNOWN_COSTS),
    CANCELS_OF_OWNERS,
    EXPECTED_ANSWERS,
)
"""The statements that make version 1, 2, …"""

IN_SQLITE = {"SERIAL": "INTEGER PRIMARY KEY", "BIGINT": "INTEGER"}
IN_POSTGRES = {
    "SERIAL": "BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY",
    "BLOB": "BYTEA",
    "TEXT": 'TEXT COLLATE "C"',  # sorted by code point, as SQLite and Python do
    " WITHOUT ROWID": "",
}


def for_sqlite(statement: str) -> str:
    """The statement in SQLite's words; its tables refuse what is not of a column's type, as PostgreSQL's do."""
    said = _said(statement, IN_SQLITE)
    if not said.startswith("CREATE TABLE"):
        return said
    return f"{said}, STRICT" if said.endswith("WITHOUT ROWID") else f"{said} STRICT"


def for_postgres(statement: str) -> str:
    """The statement in PostgreSQL's words."""
    return _said(statement, IN_POSTGRES)


def _said(statement: str, words: dict[str, str]) -> str:
    pattern = "|".join(rf"{re.escape(word)}\b" for word in words)
    return re.sub(pattern, lambda found: words[found[0]], statement)
