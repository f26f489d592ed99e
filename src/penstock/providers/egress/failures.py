"""Errors of outgoing requests, without the secrets their URLs may contain."""

from __future__ import annotations

import re

from penstock.errors import PenstockError

MAX_SHOWN = 200
SECRET_LIKE = re.compile(r"(?=[^/]*\d)[^/]{20,}|[^/]{40,}")
"""A path segment that may be a token: long and with a digit in it, or very long."""
_PARTS = re.compile(
    r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]{0,20}):/{0,2}(?P<authority>[^/\\?#]*)(?P<path>[^?#]*)(?P<rest>.*)", re.S
)
_UNPRINTABLE = re.compile(r"[^\x21-\x7e]")


def redacted(url: str) -> str:
    """Return the URL without user, query, fragment and path segments that look like tokens."""
    parts = _PARTS.fullmatch(url)
    if parts is None:
        return "…"
    host = parts["authority"].rpartition("@")[2]
    path = SECRET_LIKE.sub("…", parts["path"].replace("\\", "/"))
    shown = f"{parts['scheme']}://{host}{path}{'?…' if parts['rest'] else ''}"
    return _UNPRINTABLE.sub(_escaped, shown)[:MAX_SHOWN]


def _escaped(found: re.Match[str]) -> str:
    return "…" if found[0] == "…" else found[0].encode("unicode_escape", "replace").decode("ascii")


class EgressError(PenstockError):
    """A request did not succeed; `url` is redacted, `why` is the reason."""

    def __init__(self, url: str, why: str) -> None:
        self.url = redacted(url)
        self.why = why
        super().__init__(f"{self._what}{self.url}: {why}")

    _what = ""


class EgressDenied(EgressError):
    """The policy or a hook refused an address; nothing was sent to it."""

    _what = "not sent to "


class EgressFailed(EgressError):
    """The address was allowed, and the request failed: no connection, too slow, too large, unreadable."""

    _what = "no answer from "
