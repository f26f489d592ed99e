"""The schema of a database, version by version.

A version is a list of statements that upgrade a database from the previous version. They are written in one common
form; `for_sqlite` and `for_postgres` translate it. A published version is never changed: later changes are a new
version. All missing versions are run in one transaction, so a database is never between two versions.

SQLite stores the version number in the file header, PostgreSQL in the table `penstock_schema`.
"""

from __future__ import annotations

import re

APPLICATION_ID = int.from_bytes(b"PnSt")
"""Identifies a SQLite file with these tables, in its header. A ledger file has a different id."""

POSTGRES_LOCK = int.from_bytes(b"PnstSchm")
"""Advisory lock for creating or changing the tables, so that other processes wait and then find it done."""

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
    # coalesce() keeps SQLite from using runs_by_status for open runs, which would sort all of them for each claim.
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
    # Besides a row for each chat that refers to it, each attachment has a row with an empty chat id. Attachments older
    # than this table have no such row and are never removed, because their references are not known.
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
    # The owner of these requests was not stored: they apply to any owner, as before, for the hour they are kept.
    "INSERT INTO cancels SELECT run_id, '', reason, by_whom, at_ms, until_ms FROM cancels_of_anybody",
    "DROP TABLE cancels_of_anybody",
)
EXPECTED_ANSWERS = ("ALTER TABLE approvals ADD COLUMN expects TEXT NOT NULL DEFAULT 'null'",)

GRANTS = (
    "ALTER TABLE runs ADD COLUMN grants BIGINT NOT NULL DEFAULT 0",
    """UPDATE runs SET grants =
        (SELECT count(*) FROM events WHERE events.run_id = runs.id AND events.type = 'run.granted')
        WHERE EXISTS (SELECT 1 FROM events WHERE events.run_id = runs.id AND events.type = 'run.granted')""",
)
INTERRUPTED_ANSWERS = (
    # Messages and their run were not stored in one transaction: a process that ended in between left an answer that
    # no run would ever finish.
    """UPDATE messages SET data = replace(data, '"state":"writing"',
        '"state":"failed","error":"interrupted before its run started: ask again"')
        WHERE data LIKE '%"state":"writing"%' AND NOT EXISTS
        (SELECT 1 FROM runs WHERE runs.chat_id = messages.chat_id
        AND messages.data LIKE '%"run_id":"' || runs.id || '"%')""",
)

RUN_FACTS = (
    "ALTER TABLE runs ADD COLUMN crash_count BIGINT NOT NULL DEFAULT 0",
    "ALTER TABLE runs ADD COLUMN worked_ms BIGINT NOT NULL DEFAULT 0",
    "ALTER TABLE runs ADD COLUMN resumed_ms BIGINT",
    "ALTER TABLE runs ADD COLUMN halt TEXT NOT NULL DEFAULT 'null'",
    """UPDATE runs SET resumed_ms = (SELECT at_ms FROM events WHERE events.run_id = runs.id AND type = 'run.resumed'
        ORDER BY seq DESC LIMIT 1) WHERE status <> 'completed' AND epoch > 1""",
    # A claim that is over lasted from its start event to its first final event, or else to the last event before the
    # next start. The newest claim of a running run is not over.
    """UPDATE runs SET worked_ms = coalesce((
        SELECT CAST(sum(CASE WHEN ended.at_ms > began.at_ms THEN ended.at_ms - began.at_ms ELSE 0 END) AS BIGINT)
        FROM events AS began JOIN events AS ended ON ended.run_id = began.run_id AND ended.seq = coalesce(
            (SELECT min(seq) FROM events WHERE run_id = began.run_id AND seq > began.seq
                AND type IN ('run.completed', 'run.failed', 'run.halted', 'run.cancelled', 'run.parked')
                AND seq < coalesce((SELECT min(seq) FROM events WHERE run_id = began.run_id AND seq > began.seq
                    AND type = 'run.resumed'), 9223372036854775807)),
            (SELECT min(seq) - 1 FROM events WHERE run_id = began.run_id AND seq > began.seq AND type = 'run.resumed'))
        WHERE began.run_id = runs.id AND began.type IN ('run.started', 'run.resumed')), 0)
        WHERE status <> 'completed' AND epoch > 0""",
    # A worker was lost before a start event that follows neither a requeue nor an idle wait.
    """UPDATE runs SET crash_count = (
        SELECT count(*) FROM events AS began
        JOIN events AS last ON last.run_id = began.run_id AND last.seq = began.seq - 1
        WHERE began.run_id = runs.id AND began.type = 'run.resumed'
            AND NOT (last.type IN ('run.queued', 'run.granted') AND last.seq > 1)
            AND NOT (last.type = 'run.waiting' AND last.data LIKE '%"idle":true%')
            AND began.seq > coalesce((SELECT max(seq) FROM events WHERE run_id = began.run_id AND seq > 1
                AND type IN ('run.queued', 'run.granted')), 0))
        WHERE status IN ('running', 'waiting') AND epoch > 1""",
    """UPDATE runs SET halt = (SELECT data FROM events WHERE events.run_id = runs.id ORDER BY seq DESC LIMIT 1)
        WHERE status = 'halted' AND EXISTS (SELECT 1 FROM events WHERE events.run_id = runs.id
            AND type = 'run.halted' AND data LIKE '%"whose":%'
            AND seq = (SELECT max(seq) FROM events AS newest WHERE newest.run_id = runs.id))""",
)

TOKENS = (
    """CREATE TABLE tokens (
        id TEXT NOT NULL PRIMARY KEY,
        name TEXT NOT NULL,
        role TEXT NOT NULL,
        salt TEXT NOT NULL,
        digest TEXT NOT NULL,
        created_ms BIGINT NOT NULL,
        created_by TEXT NOT NULL,
        kind TEXT NOT NULL,
        expires_ms BIGINT,
        revoked_ms BIGINT,
        revoked_by TEXT,
        last_used_ms BIGINT,
        note TEXT NOT NULL,
        limits TEXT NOT NULL,
        models TEXT NOT NULL
    )""",
    "CREATE INDEX tokens_by_age ON tokens (created_ms, id)",
    "CREATE INDEX tokens_by_name ON tokens (name)",
)

GRAPH_AUTHORS = (
    "ALTER TABLE graph_versions ADD COLUMN saved_by TEXT NOT NULL DEFAULT ''",
    """ALTER TABLE graph_versions ADD COLUMN note TEXT NOT NULL DEFAULT '""'""",
    """CREATE TABLE graph_layouts (
        id TEXT NOT NULL PRIMARY KEY REFERENCES graphs (id),
        positions TEXT NOT NULL
    )""",
)

PAYLOADS = (
    """CREATE TABLE payloads (
        run_id TEXT NOT NULL,
        call_id TEXT NOT NULL,
        epoch BIGINT NOT NULL,
        recording TEXT NOT NULL,
        request TEXT NOT NULL,
        response TEXT NOT NULL,
        at_ms BIGINT NOT NULL,
        PRIMARY KEY (run_id, call_id)
    ) WITHOUT ROWID""",
    "CREATE INDEX payloads_by_time ON payloads (at_ms, run_id, call_id)",
)

SPENDING = (
    """CREATE TABLE spending (
        run_id TEXT NOT NULL,
        day BIGINT NOT NULL,
        owner TEXT NOT NULL,
        graph_id TEXT NOT NULL,
        node TEXT NOT NULL,
        model TEXT NOT NULL,
        runs BIGINT NOT NULL,
        calls BIGINT NOT NULL,
        cost_nanos BIGINT NOT NULL,
        tokens_in BIGINT NOT NULL,
        tokens_out BIGINT NOT NULL,
        unknown_costs BIGINT NOT NULL,
        PRIMARY KEY (run_id, day, owner, graph_id, node, model)
    ) WITHOUT ROWID""",
    "CREATE INDEX spending_by_day ON spending (day, owner)",
    # Of older runs only the sums are known: nodes and models stay empty.
    """INSERT INTO spending SELECT id, created_ms / 86400000, owner, graph_id, '', '', 1, 0, cost_nanos, tokens_in,
        tokens_out, unknown_costs FROM runs WHERE ended_ms IS NOT NULL OR status = 'parked'""",
    "CREATE INDEX runs_unresolved ON runs (created_ms, id) WHERE unresolved_nanos > 0",
    "CREATE INDEX runs_unknown_costs ON runs (created_ms, id) WHERE unknown_costs > 0",
)

TEAMS = ("ALTER TABLE tokens ADD COLUMN team TEXT NOT NULL DEFAULT ''",)

AUDIT = (
    """CREATE TABLE audit (
        id TEXT NOT NULL PRIMARY KEY,
        at_ms BIGINT NOT NULL,
        actor TEXT NOT NULL,
        action TEXT NOT NULL,
        target TEXT NOT NULL,
        owner TEXT NOT NULL,
        source TEXT NOT NULL,
        details TEXT NOT NULL
    )""",
    "CREATE INDEX audit_by_time ON audit (at_ms, id)",
    "CREATE INDEX audit_by_actor ON audit (actor, at_ms, id)",
    "CREATE INDEX audit_by_owner ON audit (owner, at_ms, id)",
    "CREATE INDEX audit_by_target ON audit (target, at_ms, id)",
)

ENGINES = (
    "ALTER TABLE runs ADD COLUMN queue TEXT",
    "ALTER TABLE runs ADD COLUMN priority BIGINT NOT NULL DEFAULT 3",
    "ALTER TABLE runs ADD COLUMN fence BIGINT NOT NULL DEFAULT 0",
    """CREATE TABLE database_identity (
        number BIGINT NOT NULL PRIMARY KEY,
        id TEXT NOT NULL
    )""",
)

MIGRATIONS: tuple[tuple[str, ...], ...] = (
    (*RUNS, *EVENTS, *JOURNAL, *GRAPHS, *APPROVALS, *CHATS),
    MEMORIES,
    (*UNUSED_CHATS, *UNKNOWN_COSTS),
    CANCELS_OF_OWNERS,
    EXPECTED_ANSWERS,
    (*GRANTS, *INTERRUPTED_ANSWERS),
    RUN_FACTS,
    TOKENS,
    GRAPH_AUTHORS,
    PAYLOADS,
    SPENDING,
    TEAMS,
    AUDIT,
    ENGINES,
)
"""The statements of version 1, 2, …"""

IN_SQLITE = {"SERIAL": "INTEGER PRIMARY KEY", "BIGINT": "INTEGER"}
IN_POSTGRES = {
    "SERIAL": "BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY",
    "BLOB": "BYTEA",
    "TEXT": 'TEXT COLLATE "C"',  # sort by code point, as SQLite and Python do
    " WITHOUT ROWID": "",
}


def for_sqlite(statement: str) -> str:
    """Translate the statement to SQLite; tables are STRICT, so that they check column types as PostgreSQL does."""
    translated = _translate(statement, IN_SQLITE)
    if not translated.startswith("CREATE TABLE"):
        return translated
    return f"{translated}, STRICT" if translated.endswith("WITHOUT ROWID") else f"{translated} STRICT"


def for_postgres(statement: str) -> str:
    """Translate the statement to PostgreSQL."""
    return _translate(statement, IN_POSTGRES)


def _translate(statement: str, words: dict[str, str]) -> str:
    pattern = "|".join(rf"{re.escape(word)}\b" for word in words)
    return re.sub(pattern, lambda found: words[found[0]], statement)
