"""How many MCP sessions are open, whose they are, and which one gives way to a new one.

A session is kept on the server until its client ends it, and many clients never do. So each user has a number of them,
and all have one together: beyond it the one goes that nothing is under way in for the longest time, of the same user
or, if all places are taken, of whoever has the most. Where something is under way in all of them, none is opened.

Pure bookkeeping: it is told the time, and ends nothing itself. What the protocol's own server has ended, because it was
idle for too long, may still stand here; it is the first to give way.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from penstock.server.errors import ApiError

RETRY_AFTER_S = 5


@dataclass(slots=True, eq=False)
class Session:
    """One that is open, or about to be."""

    owner: str
    id: str | None = None
    """None until the protocol's server has said it."""
    under_way: int = 1
    """Requests that it is answering; a stream that the client listens to is one."""
    used_s: float = 0.0
    """When the last of them ended."""


class Sessions:
    """Those of one endpoint."""

    def __init__(self, most: int, most_per_user: int) -> None:
        self._most = most
        self._most_per_user = most_per_user
        self._open: set[Session] = set()

    def open(self, owner: str) -> tuple[Session, Session | None]:
        """A place for a new one, and the session that is to be ended for it; ApiError if none can be."""
        has = Counter(one.owner for one in self._open)
        given_up = None
        if has[owner] >= self._most_per_user:
            given_up = self._idlest(has, {owner})
        elif len(self._open) >= self._most:
            given_up = self._idlest(has, set(has))
        if given_up is not None:
            self._open.remove(given_up)
        session = Session(owner)
        self._open.add(session)
        return session, given_up

    def find(self, owner: str, id: str) -> Session | None:
        """The open one of that id, if it is theirs."""
        return next((one for one in self._open if one.id == id and one.owner == owner), None)

    def rest(self, session: Session, now_s: float) -> None:
        """One of the requests that were under way in it has ended."""
        session.under_way -= 1
        session.used_s = now_s

    def forget(self, session: Session) -> None:
        """It is over."""
        self._open.discard(session)

    def _idlest(self, has: Counter[str], owners: set[str]) -> Session:
        idle = [one for one in self._open if one.owner in owners and not one.under_way]
        if not idle:
            message = f"there may be {self._most_per_user} open sessions for each user, and {self._most} in all"
            raise ApiError(429, f"{message}; end one with DELETE", retry_after_s=RETRY_AFTER_S)
        return min(idle, key=lambda one: (-has[one.owner], one.used_s))
