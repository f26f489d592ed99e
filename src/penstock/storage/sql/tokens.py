"""SQL store of access tokens."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields, replace

from penstock import checks
from penstock.hosting.ports import Conflict, StoreCorrupt
from penstock.hosting.tokens import (
    TOKEN_KINDS,
    TOKEN_ROLES,
    USE_INTERVAL_MS,
    LastAdmin,
    NameTaken,
    TokenKind,
    TokenNotFound,
    TokenRecord,
)
from penstock.storage import codec
from penstock.storage.port import Row, SqlStore, TableCheck, Transaction, Value, placeholders
from penstock.storage.rules import check_token

FIELDS = tuple(field.name for field in fields(TokenRecord))
COLUMNS = ", ".join(FIELDS)
ENCODERS: Mapping[str, Callable[[str, object], Value]] = {
    "id": codec.name,
    "name": codec.name,
    "role": codec.name,
    "salt": codec.name,
    "digest": codec.name,
    "created_ms": codec.number,
    "created_by": codec.name,
    "kind": codec.name,
    "expires_ms": codec.optional_number,
    "revoked_ms": codec.optional_number,
    "revoked_by": codec.optional_name,
    "last_used_ms": codec.optional_number,
    "note": codec.encode_text,
    "limits": codec.encode_document,
    "models": codec.encode_document,
    "team": codec.name,
}
"""Encoder of each field's column value."""

SELECT = f"SELECT {COLUMNS} FROM tokens"
INSERT = f"INSERT INTO tokens ({COLUMNS}) VALUES ({placeholders(len(FIELDS))}) ON CONFLICT (id) DO NOTHING"
ACTIVE = "revoked_ms IS NULL AND (expires_ms IS NULL OR expires_ms >= ?)"
OF_NAME = f"SELECT id FROM tokens WHERE kind = 'user' AND name = ? AND id <> ? AND {ACTIVE} ORDER BY id LIMIT 1"
ADMINS = f"SELECT id FROM tokens WHERE kind = 'user' AND role = 'admin' AND {ACTIVE} ORDER BY id"
REVOKE = "UPDATE tokens SET revoked_ms = ?, revoked_by = ? WHERE id = ? AND revoked_ms IS NULL"
USE = "UPDATE tokens SET last_used_ms = ? WHERE id = ? AND (last_used_ms IS NULL OR last_used_ms <= ?)"
HAS_ADMIN = "SELECT 1 FROM tokens WHERE kind = 'user' AND role = 'admin' LIMIT 1"


class SqlTokenStore(SqlStore):
    """A `TokenStore` over a database."""

    async def add(self, token: TokenRecord, *, is_only: bool = False) -> TokenRecord:
        check_token(token)
        values = [encode(field, getattr(token, field)) for field, encode in ENCODERS.items()]

        async def body(transaction: Transaction) -> TokenRecord:
            known = await _find(transaction, token.id)
            if known is None and is_only and token.kind == "user":
                taken = await transaction.row(OF_NAME, token.name, token.id, token.created_ms)
                if taken is not None:
                    raise NameTaken(token.name, str(taken[0]))
            if known is None:
                await transaction.run(INSERT, *values)
                known = await _find(transaction, token.id)
            if known is None or known.digest != token.digest:
                raise Conflict(f"token {token.id!r} exists and is another one; create it again, with a new secret")
            return known

        return await self._database.write(body, inline=True)

    async def get(self, token_id: str) -> TokenRecord | None:
        async def body(transaction: Transaction) -> TokenRecord | None:
            return await _find(transaction, codec.lookup_key(token_id))

        return await self._database.read(body, inline=True, single=True)

    async def list(
        self, *, kinds: Collection[TokenKind] = (), before: str | None = None, limit: int = 100
    ) -> Sequence[TokenRecord]:
        where, values = list[str](), list[Value]()
        if kinds:
            where.append(f"kind IN ({placeholders(len(kinds))})")
            values.extend(checks.choice("kinds", kind, TOKEN_KINDS) for kind in kinds)
        if before is not None:
            where.append("(created_ms, id) < (SELECT created_ms, id FROM tokens WHERE id = ?)")
            values.append(codec.lookup_key(before))
        condition = f" WHERE {' AND '.join(where)}" if where else ""
        statement = f"{SELECT}{condition} ORDER BY created_ms DESC, id DESC LIMIT ?"
        values.append(codec.limit(limit))

        async def body(transaction: Transaction) -> Sequence[TokenRecord]:
            return self._database.faults.readable(await transaction.rows(statement, *values), _decode)

        return await self._database.read(body, single=True)

    async def revoke(self, token_id: str, *, by: str, now_ms: int, keep_admin: bool = False) -> TokenRecord:
        values = codec.number("now_ms", now_ms), codec.name("by", by)

        async def body(transaction: Transaction) -> TokenRecord:
            # The admins' rows are locked first, always in the same order: of two admins who revoke each other, the
            # second one sees the revocation by the first.
            admins = await transaction.rows(f"{ADMINS}{transaction.dialect.update_lock}", now_ms)
            token = await _find(transaction, codec.lookup_key(token_id))
            if token is None:
                raise TokenNotFound(token_id)
            if token.revoked_ms is not None:
                return token
            if keep_admin and token.is_active(now_ms) and token.is_admin and [row[0] for row in admins] == [token.id]:
                raise LastAdmin(token.id)
            await transaction.run(REVOKE, *values, token.id)
            return replace(token, revoked_ms=now_ms, revoked_by=by)

        return await self._database.write(body)

    async def use(self, token_id: str, *, now_ms: int) -> None:
        codec.number("now_ms", now_ms)

        async def body(transaction: Transaction) -> None:
            await transaction.run(USE, now_ms, codec.lookup_key(token_id), now_ms - USE_INTERVAL_MS)

        await self._database.write(body, inline=True)

    async def has_admin(self) -> bool:
        async def body(transaction: Transaction) -> bool:
            return await transaction.row(HAS_ADMIN) is not None

        return await self._database.read(body, inline=True, single=True)


async def _find(transaction: Transaction, token_id: str) -> TokenRecord | None:
    row = await transaction.row(f"{SELECT} WHERE id = ?", token_id)
    return None if row is None else _decode(row)


def _decode(row: Row) -> TokenRecord:
    values = dict(zip(FIELDS, row, strict=True))
    id = values["id"]
    values["role"] = codec.decode_one_of("tokens", id, TOKEN_ROLES, values["role"])
    values["kind"] = codec.decode_one_of("tokens", id, TOKEN_KINDS, values["kind"])
    values["note"] = codec.decode_text("tokens", id, values["note"])
    for field in ("limits", "models"):
        values[field] = codec.decode_document("tokens", id, values[field])
    token = TokenRecord(**values)
    if not isinstance(token.limits, dict | None) or not isinstance(token.models, list | None):
        raise StoreCorrupt("tokens", id, "its limits are no object, or its models no list")
    return token


CHECKS = (TableCheck("tokens", COLUMNS, ("id",), ("",), _decode),)
