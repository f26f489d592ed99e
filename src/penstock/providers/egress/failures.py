"""What goes wrong with a request, told without the secrets its address may carry."""

from __future__ import annotations

import re

from penstock.errors import PenstockError

MAX_SHOWN = 200
SECRET_LIKE = re.compile(r"(?=[^/]*\d)[^/]{20,}|[^/]{40,}")
"""A piece of a path that may be a token: long, and with a digit in it; or very long."""
_PARTS = re.compile(
    r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]{0,20}):/{0,2}(?P<authority>[^/\\?#]*)(?P<path>[^?#]*)(?P<rest>.*)", re.S
)
_UNPRINTABLE = re.compile(r"[^\x21-\x7e]")


def redacted(url: str) -> str:
    """The address as it may be shown: no user, no query, no fragment, no piece of the path that looks like a token."""
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
    """A request did not succeed; `url` is shown without its secrets, `why` says what happened."""

    def __init__(self, url: str, why: str) -> None:
        self.url = redacted(url)
        self.why = why
        super().__init__(f"{self._what}{self.url}: {why}")

    _what = ""


class EgressDenied(EgressError):
    """The policy or a hook refused an address; nothing was sent to it."""

    _what = "not sent to "


class EgressFailed(EgressError):
    """The address was allowed, and the request failed: no connection, too slow, too large, not understood."""

    _what = "no answer from "
