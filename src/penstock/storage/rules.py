"""The rules that are the same for all stores: allowed changes, and conflicts.

Shared by the stores in memory and in SQL. Knows the records and the errors of the ports; reads and writes nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from string import ascii_lowercase, ascii_uppercase
from typing import Any, get_args

from penstock import checks
from penstock.chat.conversation import ChatMessage
from penstock.chat.ports import Attachment
from penstock.errors import InvalidValue
from penstock.hosting.audit import AuditFilter
from penstock.hosting.ports import (
    ENDED,
    FIGURES,
    MAX_FIGURE,
    MAX_SHARES,
    PARKED,
    TRANSITIONS,
    USAGE,
    Conflict,
    CostShare,
    PayloadRecord,
    RunIdConflict,
    RunRecord,
    RunStatus,
    SpendingKey,
)
from penstock.hosting.tokens import TOKEN_KINDS, TOKEN_ROLES, TokenRecord
from penstock.nodes import memory
from penstock.storage import codec

APPROVAL_ANSWERS = ("approved", "edited", "rejected")
APPROVAL_STATES = ("waiting", *APPROVAL_ANSWERS, "withdrawn")
PAYLOAD_RECORDINGS = ("redacted", "full")
JOURNAL_KINDS = ("node", "llm", "tool", "value")
SUBMITTED_FIELDS = ("owner", "graph_id", "graph_version", "input", "limits", "origin")
"""The fields that must be equal for a repeated submission of a run."""


def check_payloads(run_id: str, payloads: Sequence[PayloadRecord]) -> None:
    """Raise InvalidValue for a payload of another run, which the claim of this one does not cover."""
    for payload in payloads:
        if payload.run_id != run_id:
            raise InvalidValue("run_id", payload.run_id, f"the run of the claim, {run_id!r}")


# Spending.

SPENDING_KEYS: tuple[SpendingKey, ...] = get_args(SpendingKey)
DAY_MS = 86_400_000
FITTED = ("tokens_in", "tokens_out", "unknown_costs")
"""Figures of shares that are limited to the usage of the run, because late bills and replayed calls change them."""


def check_spending_keys(by: Sequence[str]) -> None:
    """Raise InvalidValue for an unknown or a repeated key."""
    for key in by:
        checks.choice("by", key, SPENDING_KEYS)
    if len({*by}) < len(by):
        raise InvalidValue("by", by, "different keys")


def day_number(at_ms: int) -> int:
    """Return the number of days since 1970, in UTC."""
    return at_ms // DAY_MS


def complete_shares(run: RunRecord, shares: Sequence[CostShare]) -> list[CostShare]:
    """Return shares that add up to the usage of the run, by node and model; see `SpendingStore.record`."""
    found: dict[tuple[str, str], CostShare] = {}
    for share in shares:
        codec.name("node", share.node)
        codec.name("model", share.model)
        for figure in FIGURES:
            checks.integer(figure, getattr(share, figure), minimum=0)
        known = found.get(share[:2])
        found[share[:2]] = share if known is None else add_shares(known, share)
    left: dict[str, Any] = {figure: min(MAX_FIGURE, getattr(run, figure, 0)) for figure in FIGURES}
    if len(found) > MAX_SHARES or sum(share.cost_nanos for share in found.values()) > left["cost_nanos"]:
        left["calls"] = sum(share.calls for share in found.values())
        return [CostShare(**left)]
    for key, share in found.items():
        found[key] = share._replace(**{figure: min(left[figure], getattr(share, figure)) for figure in FITTED})
        left = {figure: left[figure] - getattr(found[key], figure) for figure in FIGURES}
    rest = CostShare(**{**left, "calls": 0})
    if any(rest[2:]) or not found:
        found["", ""] = add_shares(found.get(("", ""), CostShare()), rest)
    return [found[key] for key in sorted(found)]


def add_shares(one: CostShare, other: CostShare) -> CostShare:
    """Return the share of `one` with the figures of both."""
    return one._replace(**{figure: getattr(one, figure) + getattr(other, figure) for figure in FIGURES})


# Runs.

_LOWER = str.maketrans(ascii_uppercase, ascii_lowercase)


def lower_ascii(text: str) -> str:
    """Return text with its ASCII letters in lower case, as all databases convert it."""
    return text.translate(_LOWER)


def search_key(text: str) -> str:
    """Return text in lower case and in the form in which texts are stored, so that all stores find the same."""
    return lower_ascii(codec.encode_text("text", text)[1:-1])


def merge_positions(stored: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the positions after the changes; a position of None is removed."""
    merged = {**stored, **changes}
    return {node: position for node, position in merged.items() if position is not None}


def check_transition(run: RunRecord, status: RunStatus) -> None:
    """Raise Conflict unless a run may go from its status to this one."""
    if status not in TRANSITIONS[run.status]:
        allowed = ", ".join(sorted(TRANSITIONS[run.status])) or "nowhere"
        raise Conflict(f"run {run.id!r} is {run.status} and cannot become {status}; it can go to: {allowed}")


def check_was(run: RunRecord, was: RunStatus | None) -> None:
    """Raise Conflict if the run no longer has the status that the caller expects."""
    if was is not None and run.status != was:
        raise Conflict(f"run {run.id!r} is {run.status} by now, and was {was}; look at it again")


def check_same_run(known: RunRecord, run: RunRecord) -> None:
    """Raise RunIdConflict unless the existing run equals the submitted one; `about` in its origin is not compared."""
    differing = [
        field for field in SUBMITTED_FIELDS if not codec.is_same(_submitted(known, field), _submitted(run, field))
    ]
    if differing:
        raise RunIdConflict(known, differing)


def _submitted(run: RunRecord, field: str) -> Any:
    value = getattr(run, field)
    return {**value, "about": None} if field == "origin" else value


def check_ended(run: RunRecord) -> None:
    """Raise Conflict unless the run has ended."""
    if run.status not in ENDED:
        raise Conflict(f"run {run.id!r} is {run.status} and has not ended: cancel it first, or wait for its end")


def check_resting(run: RunRecord) -> None:
    """Raise Conflict unless the run has ended or is parked."""
    if run.status not in ENDED | PARKED:
        raise Conflict(f"run {run.id!r} is {run.status}: its usage is counted by its worker until it has ended")


def checked_usage(usage: Mapping[str, int]) -> Mapping[str, Any]:
    """Return figures of a run; raise InvalidValue for another field, or a figure that is not an amount."""
    for field, figure in usage.items():
        checks.choice("usage", field, USAGE)
        checks.integer(field, figure)
    return usage


# Events.


def check_next_events(run_id: str, last: int, seqs: Sequence[int]) -> None:
    """Raise Conflict unless the events follow each other and begin at most one after the last stored one."""
    first = seqs[0]
    if not 1 <= first <= last + 1 or [*seqs] != [*range(first, first + len(seqs))]:
        events = f"events {first} to {seqs[-1]} of run {run_id!r}"
        raise Conflict(f"{events} do not follow the last stored event, which is {last}; continue from it without gaps")


def different_event(run_id: str, seq: int) -> Conflict:
    """Return the error for an event whose sequence number is taken by a different one."""
    return Conflict(f"run {run_id!r} has a different event {seq}; read the last seq and continue from it")


# Graphs.


def check_expected_version(graph_id: str, newest: int, expected: int | None) -> None:
    """Raise Conflict unless the newest version, 0 for none, is the expected one."""
    if expected is not None and expected != newest:
        found = f"the newest version is {newest}" if newest else "there is none"
        raise Conflict(f"graph {graph_id!r} was expected at version {expected}, and {found}; look at it and save again")


# Tokens.


def check_token(token: TokenRecord) -> None:
    """Raise InvalidValue for a token with an unknown role or kind, or with limits or models of a wrong type."""
    checks.choice("role", token.role, TOKEN_ROLES)
    checks.choice("kind", token.kind, TOKEN_KINDS)
    if token.limits is not None and not isinstance(token.limits, Mapping):
        raise InvalidValue("limits", token.limits, "an object, or None")
    if token.models is not None and (isinstance(token.models, str) or not isinstance(token.models, Sequence)):
        raise InvalidValue("models", token.models, "a list of models, or None")


# The audit log.


def check_audit_filter(wanted: AuditFilter) -> None:
    """Raise InvalidValue for a filter with a value that no entry can have."""
    for field in ("actor", "action", "target"):
        codec.optional_name(field, getattr(wanted, field))
    for field in ("since_ms", "until_ms"):
        codec.optional_number(field, getattr(wanted, field))


# People.


def check_nothing_owned(name: str, found: Mapping[str, int]) -> None:
    """Raise Conflict while a person has runs or chats, by the places where the name was found."""
    left = [f"{found[place]} {place.partition('.')[0]}" for place in ("runs.owner", "chats.owner") if place in found]
    if left:
        raise Conflict(f"{name!r} has {' and '.join(left)}; remove them first")


# Chats.


MAX_SEARCH = 1_000
"""Maximum length of a text to search for: patterns are several times as long, and databases limit them."""
ENCODED_SPACE = ("\\n", "\\r", "\\t")
"""Escapes of white space in encoded text, which a search treats as spaces."""


def search_terms(text: str) -> Sequence[str]:
    """Return the forms of a text to look for in encoded text that `searchable` has normalized."""
    if len(checks.text("text", text)) > MAX_SEARCH:
        raise InvalidValue("text", f"a text of {len(text)}", f"text of at most {MAX_SEARCH} characters")
    spaced = " ".join(text.split())
    forms = (spaced, spaced.lower(), spaced.upper(), spaced.capitalize())
    return [*dict.fromkeys(lower_ascii(codec.encode_text("text", form)[1:-1]) for form in forms)]


def searchable(encoded: str) -> str:
    """Normalize encoded text for a search: ASCII in lower case, white space as spaces; SQL does the same."""
    for escape in ENCODED_SPACE:
        encoded = encoded.replace(escape, " ")
    return lower_ascii(encoded)


def new_messages(known: Mapping[str, ChatMessage], messages: Sequence[ChatMessage]) -> Sequence[ChatMessage]:
    """Return the messages that do not exist yet; Conflict if an existing one differs or a parent is missing."""
    new: dict[str, ChatMessage] = {}
    for message in messages:
        existing = known.get(message.id) or new.get(message.id)
        if existing is None:
            new[message.id] = message
        elif not is_same_message(existing, message):
            raise Conflict(f"message {message.id!r} exists and is different; give this one an id of its own")
    _check_parents(known, new)
    return [*new.values()]


def _check_parents(known: Mapping[str, ChatMessage], new: Mapping[str, ChatMessage]) -> None:
    """Raise Conflict unless the ancestors of each new message lead to a known message or to the beginning.

    The walk stops at messages that an earlier walk has checked, so a long history is visited once.
    """
    checked: set[str] = set()
    for message in new.values():
        parent, path = message.parent_id, {message.id}
        while parent is not None and parent not in known and parent not in checked:
            if parent not in new or parent in path:
                raise Conflict(f"message {message.id!r} has no place: {parent!r} does not exist, or follows itself")
            path.add(parent)
            parent = new[parent].parent_id
        checked |= path


def is_same_message(one: ChatMessage, other: ChatMessage) -> bool:
    """Whether two messages are equal, ignoring the order of keys in their data."""
    return (
        (one.id, one.parent_id, one.role, one.content, one.at_ms)
        == (other.id, other.parent_id, other.role, other.content, other.at_ms)
        and one.data.keys() == other.data.keys()
        and codec.is_same(one.data, other.data)
    )


def check_writing(chat_id: str, message: ChatMessage) -> None:
    """Raise Conflict unless the message is an answer that is still being written."""
    state = message.data.get("state")
    if state != "writing":
        raise Conflict(f"message {message.id!r} of chat {chat_id!r} is not being written: its state is {state!r}")


def attachment_ids(messages: Iterable[ChatMessage]) -> set[str]:
    """Return the ids of the attachments that the messages refer to."""
    found: set[str] = set()
    for message in messages:
        attached = message.data.get("attachments")
        for reference in attached if isinstance(attached, Sequence) else ():
            if isinstance(reference, Mapping) and isinstance(id := reference.get("id"), str):
                found.add(id)
    return found


def check_attached(attachment: Attachment, content: object) -> None:
    """Raise InvalidValue unless the content is bytes of the attachment's size."""
    if not isinstance(content, bytes):  # the content is not shown: it may be large or private
        raise InvalidValue("content", f"this {type(content).__name__}", "bytes")
    if attachment.size != len(content):
        raise InvalidValue("size", attachment.size, f"what is attached: {len(content)} bytes")


def check_idle(chat_id: str, messages: Iterable[ChatMessage], *, has_runs: bool) -> None:
    """Raise Conflict while an answer is being written in a chat."""
    if has_runs or any(message.data.get("state") == "writing" for message in messages):
        raise Conflict(f"an answer is being written in chat {chat_id!r}: wait for its run, or cancel it")


# Memories.


@dataclass(frozen=True, slots=True)
class EncodedMemory:
    """A memory as it is stored."""

    value: str
    """Its value, as JSON."""
    words: frozenset[str]
    """The words by which a search finds it."""


def encode_memory(space: str, key: str, value: Any) -> EncodedMemory:
    """Encode a memory; InvalidValue if it cannot be stored."""
    codec.name("space of a memory", space)
    if codec.lookup_key(key) is codec.NO_MATCH or not 1 <= len(key) <= memory.MAX_KEY:
        expected = f"a text of 1 to {memory.MAX_KEY} characters, without NUL or half a surrogate pair"
        raise InvalidValue("key of a memory", key, expected)
    encoded = codec.encode_document("value of a memory", value)
    copied = json.loads(encoded)
    size = len(json.dumps(copied, ensure_ascii=False))
    if size > memory.MAX_VALUE_CHARACTERS:
        expected = f"JSON of at most {memory.MAX_VALUE_CHARACTERS} characters"
        raise InvalidValue("value of a memory", f"this {type(value).__name__} of {size}", expected)
    return EncodedMemory(encoded, frozenset(memory.words_of(key, copied)))
