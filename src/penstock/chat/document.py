"""Convert conversations to JSON and back.

Input is untrusted. Parsing checks, in this order: the size, strict JSON, each message on its own, and then that the
messages form a tree (`MessageTree.of`). Each step lists all problems it finds, and parsing stops after the first step
that finds any. Unknown fields are refused, because they would be lost when the tree is written again.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any

from penstock.chat.conversation import (
    MAX_MESSAGES,
    MAX_PROBLEMS,
    ChatMessage,
    ConversationInvalid,
    MessageTree,
)
from penstock.errors import InvalidValue
from penstock.kernel.graph import Problem, shown

VERSION = 1
MAX_DOCUMENT_CHARACTERS = 256 * 1024 * 1024

FIELDS = ("version", "messages", "chosen")
MESSAGE_FIELDS = ("id", "parent_id", "role", "content", "at_ms", "data")
NEEDED = ("id", "role", "content", "at_ms")


def conversation_to_json(tree: MessageTree) -> dict[str, Any]:
    """Return a snapshot of the conversation in the format that `parse_conversation` reads."""
    messages = [_message_to_json(message) for message in tree]
    return {"version": VERSION, "messages": messages, "chosen": list(tree.chosen())}


def parse_conversation(document: str | bytes | Mapping[str, Any]) -> MessageTree:
    """Parse the conversation in `document`; ConversationInvalid lists the problems of an invalid one."""
    decoded = document if isinstance(document, Mapping) else _decoded(document)
    ConversationInvalid.raise_any(_wrong_outside(decoded))
    problems: list[Problem] = []
    messages: list[ChatMessage] = []
    for at, one in enumerate(decoded["messages"]):
        found = _message(one, f"$.messages[{at}]")
        messages.extend(part for part in found if isinstance(part, ChatMessage))
        problems.extend(part for part in found if isinstance(part, Problem))
        if len(problems) >= MAX_PROBLEMS:
            break
    ConversationInvalid.raise_any(problems)
    return MessageTree.of(messages, decoded.get("chosen", ()))


def _message_to_json(message: ChatMessage) -> dict[str, Any]:
    written: dict[str, Any] = {
        "id": message.id,
        "parent_id": message.parent_id,
        "role": message.role,
        "content": message.content,
        "at_ms": message.at_ms,
    }
    return {**written, "data": deepcopy(dict(message.data))} if message.data else written


def _decoded(document: str | bytes) -> Any:
    if not isinstance(document, (str, bytes)):
        raise ConversationInvalid([Problem("wrong_type", "$", f"not an object but a {type(document).__name__}")])
    if len(document) > MAX_DOCUMENT_CHARACTERS:
        raise ConversationInvalid([Problem("too_large", "$", f"more than {MAX_DOCUMENT_CHARACTERS} characters")])
    try:
        text = document if isinstance(document, str) else document.decode("utf-8")
        return json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_as_object)
    except RecursionError:
        problem = Problem("too_deep", "$", "values are nested too deeply")
    except ValueError as error:
        problem = Problem("bad_json", "$", f"this is not JSON: {str(error)[:200]}")
    raise ConversationInvalid([problem])


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a number of JSON")


def _as_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key occurs twice in one object")
    return found


def _wrong_outside(decoded: Any) -> Iterator[Problem]:
    """Yield the problems of the document outside the messages."""
    if not isinstance(decoded, Mapping):
        yield Problem("wrong_type", "$", f"a conversation is an object, not a {type(decoded).__name__}")
        return
    yield from _unknown_fields(decoded, FIELDS, "$")
    if decoded.get("version") != VERSION or isinstance(decoded.get("version"), bool):
        yield Problem("bad_version", "$.version", f"{VERSION} can be read, not {shown(decoded.get('version'))}")
    messages = decoded.get("messages")
    for name, listed in (("messages", messages), ("chosen", decoded.get("chosen", []))):
        if not isinstance(listed, list):
            yield Problem("wrong_type", f"$.{name}", f"a list, not a {type(listed).__name__}")
        elif len(listed) > MAX_MESSAGES:
            yield Problem("too_large", f"$.{name}", f"{len(listed)} are more than {MAX_MESSAGES}")
        elif name == "chosen" and not all(isinstance(id, str) for id in listed):
            yield Problem("wrong_type", "$.chosen", "a list of the ids of messages")


def _message(one: Any, path: str) -> list[ChatMessage | Problem]:
    """Return the parsed message, or its problems."""
    if not isinstance(one, Mapping):
        return [Problem("wrong_type", path, f"a message is an object, not a {type(one).__name__}")]
    problems: list[ChatMessage | Problem] = [*_unknown_fields(one, MESSAGE_FIELDS, path)]
    missing = [name for name in NEEDED if name not in one]
    problems += [Problem("missing_field", f"{path}.{name}", "every message has one") for name in missing]
    if problems:
        return problems
    try:
        return [ChatMessage(**{"parent_id": None, **one})]
    except InvalidValue as invalid:
        return [Problem(f"bad_{invalid.field}", f"{path}.{invalid.field}", str(invalid))]


def _unknown_fields(one: Mapping[Any, Any], known: tuple[str, ...], path: str) -> Iterator[Problem]:
    for name in one:
        if name not in known:
            yield Problem("unknown_field", path, f"there is no field {shown(name)}; there are: {', '.join(known)}")
            return  # report only the first: an object may have a million
