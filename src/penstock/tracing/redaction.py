"""Redact secrets in names, messages and data.

Works on texts and keys, and knows nothing of traces.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import lru_cache
from itertools import pairwise
from typing import Any

from penstock.errors import InvalidValue
from penstock.tracing.jsonable import jsonable

MAX_NAME = 200
MAX_SHOWN = 2_000
MAX_READ = 20_000

REDACTED = "[redacted]"
MIN_SECRET = 4

_SECRET_WORDS = frozenset(
    ("password", "passwd", "passphrase", "pwd", "secret", "secrets", "authorization", "apikey")  # as one word
).union(("credential", "credentials", "cookie", "cookies"))
_SECRET_ENDS = frozenset(("token", "auth", "bearer", "jwt", "dsn"))
_SECRET_KEYS = frozenset(("api", "private", "access", "secret", "signing", "encryption", "auth", "master", "session"))
"""Words before `key` that make a key secret."""

_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+")

_TEXT_SECRETS = re.compile(
    r"""
      -----BEGIN\ [A-Z ]{0,30}PRIVATE\ KEY-----.*?(?:-----END\ [A-Z ]{0,30}PRIVATE\ KEY-----|\Z)
    | (?<=://) [^\s/@:]{0,200} : [^\s/@]{1,500} (?=@)
    | (?P<header> (?i:\b(?:proxy-)?authorization | \b(?:set-)?cookie) \\*["']?\s*[:=]\s*\\*["']? ) [^\r\n"']{2,}
    | (?P<query> [?&](?i:key|sig|signature|auth|jwt|x-amz-signature|x-goog-signature)= ) [^\s"'&\#]{3,}
    | (?P<named> \b[\w-]{0,40} (?i:password|passwd|passphrase|pwd|secret|api[-_]?key|access[-_]?key|private[-_]?key
        |token|credential) \\*["']?\s*[:=]\s*\\*["']? ) (?!\[redacted) [^\s"'&;,})\]]{3,}
    | (?P<scheme> (?i:\bbearer)\s+ ) [^\s"',;]{4,}
    | (?P<basic> \bBasic\s+ ) (?=[A-Za-z+/]{0,200}[0-9=]) [A-Za-z0-9+/]{8,}={0,2}
    | \b(?: sk[-_][\w-]{8,} | [pr]k_(?:live|test)_\w{8,} | gh[pousr]_\w{16,} | github_pat_\w{16,} | glpat-[\w-]{12,}
        | xox[a-z]-[\w-]{8,} | xapp-[\w-]{8,} | (?:hf|npm|gsk|nvapi|r8|lsv2)[-_][\w-]{16,} | pypi-[\w-]{16,}
        | xai-\w{16,} | tvly-[\w-]{12,} | (?:AKIA|ASIA)[0-9A-Z]{12,} | AIza[\w-]{20,} | ya29\.[\w-]{16,}
        | SG\.[\w-]{12,}\.[\w-]{12,} | eyJ[\w-]{8,}\.[\w-]{8,}(?:\.[\w-]*)? | (?i:canary)[-_][\w-]{4,} )
    """,
    re.VERBOSE | re.DOTALL,
)
"""Formats of secrets in any text; every repetition is bounded or cannot be re-read, so that matching is linear."""


def redact(value: object, secrets: Iterable[str] = ()) -> Any:
    """Return `value` as JSON data without apparent secrets, and without the texts given as `secrets`.

    Redacted are the values of keys such as `api_key` or `password`; and, in any text and key, bearer tokens, passwords
    in URLs, private keys, the token formats of well-known services, and `secret=…` written out.
    """
    return Redaction(secrets).data(value)


class Redaction:
    """The redaction rules of one export."""

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        known: list[object] = [secrets] if isinstance(secrets, str) else list(secrets)
        for secret in known:
            if not isinstance(secret, str) or len(secret) < MIN_SECRET:
                raise InvalidValue("secrets", "<not shown>", f"texts of {MIN_SECRET} characters or more")
        longest_first = sorted({str(secret) for secret in known}, key=len, reverse=True)
        self._known = re.compile("|".join(map(re.escape, longest_first))) if known else None
        self._cached = lru_cache(4_096)(self._redacted)

    def text(self, text: str, limit: int = MAX_SHOWN) -> str:
        """Return the text without secrets, truncated to `limit` characters."""
        if len(text) <= MAX_NAME:
            shown = self._cached(text)
        else:
            shown = self._redacted(text[:MAX_READ])
            if len(text) > MAX_READ:
                # What the cut went through may be half a secret, which no rule knows any more.
                shown = shown.rpartition(" ")[0]
        return shown if len(shown) <= limit else f"{shown[:limit]}…"

    def name(self, name: str) -> str:
        """Return a name without secrets, on one line of plain text."""
        return printable(self.text(name, MAX_NAME))

    def data(self, value: object) -> Any:
        """Return the value as JSON data without secrets."""
        return self._data(jsonable(value))

    def uncut(self, data: Any) -> Any:
        """Return JSON data without secrets, with its texts in full length."""
        return self._data(data, self._whole)

    def _whole(self, text: str) -> str:
        return self._cached(text) if len(text) <= MAX_NAME else self._redacted(text)

    def _data(self, value: Any, text: Callable[[str], str] | None = None) -> Any:
        text = text or self.text
        if isinstance(value, str):
            return text(value)
        if isinstance(value, dict):
            name = value.get("name", value.get("key"))
            if "value" in value and isinstance(name, str) and is_secret_key(name):
                value = {**value, "value": REDACTED}  # a header or a parameter by its name
            return {
                self.text(key, MAX_NAME): REDACTED if _hides(key, item) else self._data(item, text)
                for key, item in value.items()
            }
        if isinstance(value, list):
            return [
                [self._data(item[0], text), REDACTED] if _is_secret_pair(item) else self._data(item, text)
                for item in value
            ]
        return value

    def _redacted(self, text: str) -> str:
        if not text.isascii():
            text = text.encode("utf-8", "replace").decode()  # half a surrogate pair can be written nowhere
        if self._known is not None:
            text = self._known.sub(REDACTED, text)
        return _TEXT_SECRETS.sub(_hide, text)


def _hides(key: str, item: Any) -> bool:
    """Whether `item` is redacted because of its key. `tokens` may be a count; a list of tokens is redacted."""
    if item is None or isinstance(item, bool):
        return False
    return is_secret_key(key) or (isinstance(item, list) and key[-6:].lower() == "tokens")


def _is_secret_pair(item: Any) -> bool:
    """Whether the item is a pair of a name and a value, as headers are written, with a secret name."""
    return isinstance(item, list) and len(item) == 2 and isinstance(item[0], str) and is_secret_key(item[0])


@lru_cache(4_096)
def is_secret_key(key: str) -> bool:
    """Whether the value of this key is secret."""
    words = [word.lower() for word in _WORD.findall(key[:MAX_NAME])]
    if not words:
        return False
    keys = any(one in _SECRET_KEYS and after in ("key", "keys") for one, after in pairwise(words))
    return keys or words[-1] in _SECRET_ENDS or not _SECRET_WORDS.isdisjoint(words)


def _hide(found: re.Match[str]) -> str:
    kept = found["header"] or found["query"] or found["named"] or found["scheme"] or found["basic"] or ""
    return kept + REDACTED


def printable(text: str) -> str:
    """Return one line of plain text: no line breaks, terminal codes, or marks that reverse the reading direction."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
