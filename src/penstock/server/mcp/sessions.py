"""Limits on open MCP sessions, and the choice of a session to evict for a new one.

A session is kept until its client ends it, and many clients never do. So sessions are limited per user and in total.
Over the limit, the session that has been idle longest is evicted: one of the same user or, at the total limit, of the
user with the most sessions. If all of these have active requests, no session is opened.

Pure bookkeeping: the caller passes the time and ends the evicted session. A session that the MCP library has ended,
because it was idle for too long, may still be listed here; it is the first to be evicted.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from penstock.server.errors import ApiError

RETRY_AFTER_S = 5


@dataclass(slots=True, eq=False)
class Session:
    """A session that is open or being opened."""

    owner: str
    id: str | None = None
    """None until the MCP library has assigned it."""
    active_requests: int = 1
    """Number of active requests, including a stream that the client listens to."""
    used_s: float = 0.0
    """When the last request ended."""


class Sessions:
    """The sessions of one endpoint."""

    def __init__(self, max_sessions: int, max_per_user: int) -> None:
        self._max_sessions = max_sessions
        self._max_per_user = max_per_user
        self._open: set[Session] = set()

    def open(self, owner: str) -> tuple[Session, Session | None]:
        """Add a new session; return it and the session to end for it, if any. Raises ApiError (429) if none is idle."""
        counts = Counter(session.owner for session in self._open)
        evicted = None
        if counts[owner] >= self._max_per_user:
            evicted = self._idlest(counts, {owner})
        elif len(self._open) >= self._max_sessions:
            evicted = self._idlest(counts, set(counts))
        if evicted is not None:
            self._open.remove(evicted)
        session = Session(owner)
        self._open.add(session)
        return session, evicted

    def find(self, owner: str, id: str) -> Session | None:
        """Return the open session of that id and owner; None if there is none."""
        return next((session for session in self._open if session.id == id and session.owner == owner), None)

    def end_request(self, session: Session, now_s: float) -> None:
        """Record that one of the session's requests has ended."""
        session.active_requests -= 1
        session.used_s = now_s

    def forget(self, session: Session) -> None:
        """Remove a session that is over."""
        self._open.discard(session)

    def _idlest(self, counts: Counter[str], owners: set[str]) -> Session:
        idle = [session for session in self._open if session.owner in owners and not session.active_requests]
        if not idle:
            message = (
                f"at most {self._max_per_user} open sessions per user and {self._max_sessions} in total are allowed"
            )
            raise ApiError(429, f"{message}; end one with DELETE", retry_after_s=RETRY_AFTER_S)
        return min(idle, key=lambda session: (-counts[session.owner], session.used_s))
