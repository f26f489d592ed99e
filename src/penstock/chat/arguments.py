"""What callers of the chat service may hand in: a value of another kind is refused by name, before anything is asked.

Knows nothing of chats; lengths come from `limits`.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.chat.limits import must_fit
from penstock.chat.message import MAX_ID, can_be_written
from penstock.errors import InvalidValue
from penstock.ids import AN_ID, ID


def must_be_text(field: str, text: object, most: int, to_do: str) -> None:
    """InvalidValue for what is no text, ChatLimitReached if it is longer than `most`: then `to_do` says what to do."""
    if not isinstance(text, str) or not can_be_written(text):
        raise InvalidValue(field, text, "text, without half a surrogate pair")
    must_fit(field, len(text), most, to_do)


def must_be_named(field: str, name: object) -> None:
    """InvalidValue for what cannot be the name of somebody, or the id of something that may be there."""
    if not isinstance(name, str) or not 1 <= len(name) <= MAX_ID or "\0" in name or not can_be_written(name):
        raise InvalidValue(field, name, f"text of 1 to {MAX_ID} characters")


def must_be_line(field: str, text: object, most: int) -> None:
    """InvalidValue for what does not fit on a line."""
    if not isinstance(text, str) or not 1 <= len(text) <= most or not text.isprintable():
        raise InvalidValue(field, text, f"1 to {most} characters on one line")


def must_be_id(field: str, id: object) -> None:
    """InvalidValue for what cannot be the id of something new."""
    if not isinstance(id, str) or ID.fullmatch(id) is None:
        raise InvalidValue(field, id, AN_ID)


def must_be_version(field: str, version: object) -> None:
    """InvalidValue for what cannot be the version of a graph; None is the newest."""
    if version is not None and (type(version) is not int or version < 1):
        raise InvalidValue(field, version, "the number of a version, from 1, or None for the newest")


def must_be_list(field: str, values: object, of: str) -> None:
    """InvalidValue for what is no list; a text is none, though one can go through it letter by letter."""
    # A list or a tuple is told at once; to ask the abstract class takes longer.
    if not isinstance(values, (list, tuple, Sequence)) or isinstance(values, (str, bytes, bytearray)):
        raise InvalidValue(field, values, f"a list of {of}")
