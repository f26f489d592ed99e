"""Access tokens in memory."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from penstock import checks
from penstock.hosting.ports import Conflict
from penstock.hosting.tokens import (
    TOKEN_KINDS,
    TOKEN_ROLES,
    LastAdmin,
    NameTaken,
    TokenKind,
    TokenNotFound,
    TokenRecord,
)
from penstock.storage import codec
from penstock.storage.memory.record_codec import RecordCodec
from penstock.storage.memory.undo import UndoLog
from penstock.storage.rules import check_token

TOKEN = RecordCodec(
    TokenRecord,
    names=("id", "name", "salt", "digest", "created_by", "revoked_by", "team"),
    texts=("note",),
    numbers=("created_ms", "expires_ms", "revoked_ms", "last_used_ms"),
    documents=("limits", "models"),
    optional=("expires_ms", "revoked_ms", "revoked_by", "last_used_ms"),
    choices={"role": TOKEN_ROLES, "kind": TOKEN_KINDS},
)


class MemoryTokenStore:
    """Tokens by id."""

    def __init__(self, undo: UndoLog | None = None) -> None:
        self._undo = undo or UndoLog()
        self._tokens: dict[str, TokenRecord] = {}

    async def add(self, token: TokenRecord, *, is_only: bool = False) -> TokenRecord:
        check_token(token)
        encoded = TOKEN.encode(token)
        known = self._tokens.get(token.id)
        if known is None:
            if is_only and token.kind == "user":
                self._check_name(token)
            return self._store(encoded)
        if known.digest != token.digest:
            raise Conflict(f"token {token.id!r} exists and is another one; create it again, with a new secret")
        return TOKEN.decode(known)

    async def get(self, token_id: str) -> TokenRecord | None:
        token = self._tokens.get(token_id)
        return None if token is None else TOKEN.decode(token)

    async def list(
        self, *, kinds: Collection[TokenKind] = (), before: str | None = None, limit: int = 100
    ) -> Sequence[TokenRecord]:
        codec.limit(limit)
        for kind in kinds:
            checks.choice("kinds", kind, TOKEN_KINDS)
        newest = sorted(self._tokens.values(), key=_age, reverse=True)
        if before is not None:
            last = self._tokens.get(before)
            newest = [] if last is None else [token for token in newest if _age(token) < _age(last)]
        return [TOKEN.decode(token) for token in newest if not kinds or token.kind in kinds][:limit]

    async def revoke(self, token_id: str, *, by: str, now_ms: int, keep_admin: bool = False) -> TokenRecord:
        codec.number("now_ms", now_ms), codec.name("by", by)
        token = self._tokens.get(token_id)
        if token is None:
            raise TokenNotFound(token_id)
        if token.revoked_ms is not None:
            return TOKEN.decode(token)
        admins = [known.id for known in self._tokens.values() if known.is_admin and known.is_active(now_ms)]
        if keep_admin and admins == [token_id]:
            raise LastAdmin(token_id)
        return self._store(replace(token, revoked_ms=now_ms, revoked_by=by))

    async def use(self, token_id: str, *, now_ms: int) -> None:
        codec.number("now_ms", now_ms)
        token = self._tokens.get(token_id)
        if token is not None and token.is_use_due(now_ms):
            self._store(replace(token, last_used_ms=now_ms))

    async def has_admin(self) -> bool:
        return any(token.is_admin for token in self._tokens.values())

    def _check_name(self, token: TokenRecord) -> None:
        taken = [
            known.id
            for known in self._tokens.values()
            if known.kind == "user" and known.name == token.name and known.is_active(token.created_ms)
        ]
        if taken:
            raise NameTaken(token.name, min(taken))

    def _store(self, token: TokenRecord) -> TokenRecord:
        self._undo.entry(self._tokens, token.id)
        self._tokens[token.id] = token
        return TOKEN.decode(token)


def _age(token: TokenRecord) -> tuple[int, str]:
    return token.created_ms, token.id
