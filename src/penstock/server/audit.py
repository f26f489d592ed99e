"""Which requests the audit log records, and how.

A request of `ACTIONS` is recorded when it succeeds, before its response begins: a client that receives a success can
rely on the entry. Routes add the owner of the affected thing and the figures of the request (`note`). Starting runs and
sending chat messages are not recorded here: runs and messages have their own records, with owner and time.

If the database cannot store an entry, the action still counts: the entry is logged as an error, kept in memory, and
stored before the next one.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock import logs
from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.hosting.audit import AuditRecord, AuditStore
from penstock.hosting.ports import INTERACTIVE_ATTEMPTS, StoreUnavailable, retry_unavailable
from penstock.ids import new_run_id

LOG = logging.getLogger("penstock.audit")
MAX_UNSTORED = 1_000
"""Maximum number of entries kept while the database is unavailable; beyond it, the oldest are only in the log."""
MAX_TEXT = 500
"""Maximum number of characters stored of a text, such as a reason."""

ACTIONS: Mapping[str, Mapping[str, str]] = {
    "/api/graphs": {"POST": "graph.save"},
    "/api/graphs/{graph_id}": {"PUT": "graph.save", "DELETE": "graph.archive"},
    "/api/runs/{run_id}/cancel": {"POST": "run.cancel"},
    "/api/runs/{run_id}/resume": {"POST": "run.resume"},
    "/api/runs/{run_id}/grant": {"POST": "run.grant"},
    "/api/runs/{run_id}/bills/resolve": {"POST": "bill.resolve"},
    "/api/runs/{run_id}/bills/release": {"POST": "bill.release"},
    "/api/approvals/{approval_id}/approve": {"POST": "approval.approve"},
    "/api/approvals/{approval_id}/edit": {"POST": "approval.edit"},
    "/api/approvals/{approval_id}/reject": {"POST": "approval.reject"},
    "/api/chats/{chat_id}": {"DELETE": "chat.delete"},
    "/api/attachments/{attachment_id}": {"DELETE": "attachment.delete"},
    "/api/tokens": {"POST": "token.create"},
    "/api/tokens/{token_id}/revoke": {"POST": "token.revoke"},
    "/api/tokens/{token_id}/bills/resolve": {"POST": "bill.resolve"},
    "/api/tokens/{token_id}/bills/release": {"POST": "bill.release"},
    "/api/people/{name}/export": {"GET": "person.export"},
    "/api/people/{name}/erase": {"POST": "person.erase"},
    "/v1/responses/{response_id}": {"DELETE": "response.delete"},
    "/v1/responses/{response_id}/cancel": {"POST": "run.cancel"},
}
"""Action by route and method."""
STARTS_A_RUN = "starts a run, which is a record of its own"
IN_CHAT = "is a message or a run of a chat, which is a record of its own"
NOT_RECORDED: Mapping[str, Mapping[str, str]] = {
    "/api/graphs/validate": {"POST": "changes nothing"},
    "/api/graphs/{graph_id}/layout": {"PATCH": "moves nodes on a canvas"},
    "/api/runs": {"POST": STARTS_A_RUN},
    "/api/runs/{run_id}/fork": {"POST": STARTS_A_RUN},
    "/api/runs/{run_id}/replay": {"POST": STARTS_A_RUN},
    "/api/chats": {"POST": IN_CHAT},
    "/api/chats/{chat_id}": {"PATCH": "changes a title"},
    "/api/chats/{chat_id}/messages": {"POST": IN_CHAT},
    "/api/chats/{chat_id}/messages/{message_id}/continue": {"POST": IN_CHAT},
    "/api/chats/{chat_id}/messages/{message_id}/retry": {"POST": IN_CHAT},
    "/api/chats/{chat_id}/messages/{message_id}/edit": {"POST": IN_CHAT},
    "/api/chats/{chat_id}/messages/{message_id}/choose": {"POST": "changes what is shown"},
    "/api/agents/{graph_id}/chat": {"POST": IN_CHAT},
    "/api/attachments": {"POST": IN_CHAT},
    "/v1/chat/completions": {"POST": STARTS_A_RUN},
    "/v1/embeddings": {"POST": STARTS_A_RUN},
    "/v1/responses": {"POST": STARTS_A_RUN},
    "/mcp": {"POST": STARTS_A_RUN, "DELETE": "ends a session"},
}
"""Why a request that changes something has no entry, by route and method."""

_noted: ContextVar[dict[str, Any] | None] = ContextVar("penstock_audit", default=None)


def note(*, target: str | None = None, owner: str | None = None, **details: Any) -> None:
    """Add facts to the entry of the current request, if it gets one; long text is truncated."""
    noted = _noted.get()
    if noted is not None:
        given = {"target": target, "owner": owner}
        noted.update({name: value for name, value in given.items() if value is not None})
        cut = ((name, value[:MAX_TEXT] if isinstance(value, str) else value) for name, value in details.items())
        noted.setdefault("details", {}).update({name: value for name, value in cut if value not in (None, "")})


class AuditLog:
    """Stores entries in order: entries that an outage has delayed come first."""

    def __init__(self, store: AuditStore, clock: Clock = SYSTEM_CLOCK) -> None:
        self._store = store
        self._clock = clock
        self._unstored: deque[AuditRecord] = deque(maxlen=MAX_UNSTORED)

    async def write(self, actor: str, action: str, noted: Mapping[str, Any]) -> None:
        """Store an entry for an action that a user has just performed; never raises because of the database."""
        owner = noted.get("owner", "")
        entry = AuditRecord(
            new_run_id(),
            self._clock.time_ns() // 1_000_000,
            actor,
            action,
            noted.get("target", ""),
            "" if owner == actor else owner,
            "api",
            noted.get("details", {}),
        )
        about = {"id": entry.id, "actor": actor, "action": action, "target": entry.target, "owner": entry.owner or None}
        logs.record(LOG, "audit", about)
        self._unstored.append(entry)
        try:
            while self._unstored:
                oldest = self._unstored[0]
                await retry_unavailable(lambda entry=oldest: self._store.append(entry), INTERACTIVE_ATTEMPTS)  # type: ignore[misc]
                if self._unstored and self._unstored[0] is oldest:  # another request may have stored it meanwhile
                    self._unstored.popleft()
        except StoreUnavailable as error:
            LOG.error("audit entry %s (%s of %s) is not stored yet: %s", entry.id, action, entry.target, error)


class AuditGuard:
    """Records the requests of `ACTIONS` that succeed."""

    def __init__(self, app: ASGIApp, log: AuditLog) -> None:
        self._app = app
        self._log = log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        action = None
        if scope["type"] == "http":
            action = ACTIONS.get(scope["state"].get("route", ""), {}).get(scope["method"])
        if action is None:
            await self._app(scope, receive, send)
            return
        noted: dict[str, Any] = {}
        _noted.set(noted)

        async def recording(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] < 400:
                named = scope.get("path_params", {})
                target = str(next(iter(named.values()), ""))
                await self._log.write(scope["state"]["user"].name, action, {"target": target, **noted})
            await send(message)

        await self._app(scope, receive, recording)
