"""A request as a conversation: who said what, and which pictures came with it.

What an earlier answer asked of tools, and what those gave, is told as text: the tools of the graph are its own, and
those of the client are not run here. Pictures and files are taken as `data:` URLs only; nothing is fetched.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from urllib.parse import unquote_to_bytes

from penstock.agents.messages import Role
from penstock.chat.limits import MAX_ATTACHMENT_BYTES, MAX_CHARACTERS, must_fit
from penstock.errors import InvalidValue
from penstock.server.openai.wire.bodies import (
    UNHEARD,
    ChatCompletionBody,
    ChatMessageBody,
    Function,
    InputItem,
    Part,
    ResponseBody,
)
from penstock.server.schemas import MEDIA_TYPE

TEXT_PARTS = frozenset({"text", "input_text", "output_text"})
OWN_TOOLS = "this server runs its tools itself, and calls in an answer are told when they are done; say what is next"
DATA_URL = re.compile(
    rf"data:({MEDIA_TYPE.strip('^$')})((?:;[\w-]+=[^;,]*)*)(;base64)?,(.*)", re.DOTALL | re.ASCII | re.IGNORECASE
)


@dataclass(frozen=True, slots=True)
class File:
    """Bytes that came with a message."""

    name: str
    media_type: str
    content: bytes
    where: str = field(default="", compare=False)
    """The field of the request that it came in."""
    named_in: str = field(default="", compare=False)
    """The field of the request that names it."""


@dataclass(frozen=True, slots=True)
class Turn:
    """What one side said."""

    role: Role
    text: str
    files: tuple[File, ...] = field(default=())
    where: str = field(default="", compare=False)
    """The field of the request that says it."""
    is_of_tool: bool = field(default=False, compare=False)
    """Whether it is what a tool gave."""


def of_chat_completion(body: ChatCompletionBody) -> list[Turn]:
    """The conversation in `messages`; InvalidValue names the message that cannot be taken."""
    turns = [_of_message(message, f"messages.{at}") for at, message in enumerate(body.messages)]
    return _must_ask(turns, "messages")


def of_response(body: ResponseBody) -> list[Turn]:
    """The conversation in `instructions` and `input`; one that goes on keeps the instructions it began with."""
    begins = body.previous_response_id is None
    turns = [Turn("system", body.instructions, where="instructions")] if body.instructions and begins else []
    if isinstance(body.input, str):
        turns.append(Turn("user", body.input, where="input"))
    else:
        turns.extend(_of_item(item, f"input.{at}") for at, item in enumerate(body.input) if item.type not in UNHEARD)
    return _must_ask(turns, "input")


def check_lengths(turns: Sequence[Turn]) -> None:
    """InvalidValue names what is longer than a chat takes, and the last message if it says nothing."""
    for turn in turns:
        must_fit(turn.where, len(turn.text), MAX_CHARACTERS, "say it in fewer characters")
        for file in turn.files:
            must_fit(file.where, len(file.content), MAX_ATTACHMENT_BYTES, "send a smaller one, in bytes")
    if not turns[-1].text and not turns[-1].files:
        raise InvalidValue(turns[-1].where, turns[-1].text, "something to say, or a picture or a file")


def check_supported(body: ChatCompletionBody | ResponseBody) -> None:
    """InvalidValue for what would change the meaning of the answer and cannot be done here."""
    if isinstance(body, ChatCompletionBody):
        form = body.response_format
        if body.n not in (None, 1):
            raise InvalidValue("n", body.n, "1: a graph answers once")
    else:
        form = body.text.format if body.text else None
        if body.conversation is not None:
            hint = "left out, for there are no conversations here by id: go on with previous_response_id"
            raise InvalidValue("conversation", body.conversation, hint)
    if form is not None and form.type != "text":
        where = "response_format" if isinstance(body, ChatCompletionBody) else "text.format"
        raise InvalidValue(where, form.type, "text: the graph says in what form it answers")
    if body.tool_choice not in (None, "auto", "none"):
        raise InvalidValue("tool_choice", body.tool_choice, "auto or none: a graph uses its own tools, as it sees fit")


def text_to_add(turns: Sequence[Turn], where: str) -> tuple[str, tuple[File, ...]]:
    """What is said next in a conversation that is kept here: by the user alone, in as many messages as they like."""
    for turn in turns:
        if turn.is_of_tool:
            raise InvalidValue(where, "the result of a tool", f"what the user says next: {OWN_TOOLS}")
        if turn.role != "user":
            raise InvalidValue(where, turn.role, "what the user says next: the rest of the conversation is kept here")
    return "\n\n".join(turn.text for turn in turns), tuple(file for turn in turns for file in turn.files)


def _must_ask(turns: list[Turn], where: str) -> list[Turn]:
    if not turns:
        raise InvalidValue(where, None, "something that the user says")
    asks = "a conversation whose last message is the user's"
    if turns[-1].is_of_tool:
        raise InvalidValue(where, "the result of a tool", f"{asks}: {OWN_TOOLS}")
    if turns[-1].role != "user":
        raise InvalidValue(where, turns[-1].role, asks)
    return turns


def _of_message(message: ChatMessageBody, where: str) -> Turn:
    text, files = _of_content(message.content, f"{where}.content")
    if message.role in ("tool", "function"):
        named = message.name or message.tool_call_id or "a tool"
        return Turn("assistant", _result_text(named, text), files, f"{where}.content", is_of_tool=True)
    calls = [made.function or made.custom or Function() for made in message.tool_calls or ()]
    calls += [message.function_call] if message.function_call else []
    told = [_call_text(call.name, call.arguments or call.input) for call in calls]
    text = "\n".join(part for part in (text or message.refusal or "", *told) if part)
    return Turn(_role(message.role), text, files, f"{where}.content")


def _of_item(item: InputItem, where: str) -> Turn:
    if item.type == "message":
        if item.role is None:
            raise InvalidValue(f"{where}.role", None, "user, assistant, system or developer")
        text, files = _of_content(item.content, f"{where}.content")
        return Turn(_role(item.role), text, files, f"{where}.content")
    text, files = _of_content(item.output, f"{where}.output")
    if item.type in ("function_call", "custom_tool_call", "mcp_call"):
        called = _call_text(item.name or "", item.arguments or item.input or "")
        gave = [_result_text(item.name or "a tool", text)] if item.output is not None else []  # of an mcp_call
        return Turn("assistant", "\n".join((called, *gave)), files, f"{where}.arguments")
    if item.type in ("function_call_output", "custom_tool_call_output"):
        told = _result_text(item.name or "a tool", text)
        return Turn("assistant", told, files, f"{where}.output", is_of_tool=True)
    if item.type == "item_reference":
        hint = "the item itself, for items are not kept by id: go on with previous_response_id, or send the message"
        raise InvalidValue(f"{where}.type", item.type, hint)
    raise InvalidValue(f"{where}.type", item.type, "message, function_call or function_call_output")


def _role(role: str) -> Role:
    if role == "user":
        return "user"
    return "assistant" if role == "assistant" else "system"


def _call_text(name: str, arguments: str) -> str:
    return f"[called {name} with {arguments or '{}'}]"


def _result_text(name: str, text: str) -> str:
    return f"[{name} gave: {text}]"


def _of_content(content: str | Iterable[Part] | None, where: str) -> tuple[str, tuple[File, ...]]:
    if content is None or isinstance(content, str):
        return content or "", ()
    texts: list[str] = []
    files: list[File] = []
    for at, part in enumerate(content):
        if part.type in TEXT_PARTS:
            texts.append(part.text or "")
        elif part.type == "refusal":
            texts.append(part.refusal or "")
        else:
            files.append(_file_of(part, f"{where}.{at}", len(files) + 1))
    return "\n".join(texts), tuple(files)


def _file_of(part: Part, where: str, number: int) -> File:
    if part.type in ("image_url", "input_image"):
        url = part.image_url if isinstance(part.image_url, str) else part.image_url.url if part.image_url else None
        return _of_data_url(url, f"{where}.image_url", f"image-{number}")
    if part.type in ("file", "input_file"):
        inside, at = (part.file, f"{where}.file") if part.file is not None else (part, where)
        name = _last_part(inside.filename or "") or f"file-{number}"
        return replace(_of_data_url(inside.file_data, f"{at}.file_data", name), named_in=f"{at}.filename")
    raise InvalidValue(f"{where}.type", part.type, "text, an image or a file")


def _last_part(path: str) -> str:
    """The name alone: clients send the path that a file had with them."""
    return path.replace("\\", "/").rpartition("/")[2]


def _of_data_url(url: object, where: str, name: str) -> File:
    found = DATA_URL.fullmatch(url) if isinstance(url, str) else None
    if found is None:
        shown = url if not isinstance(url, str) else url[:40]
        raise InvalidValue(where, shown, "a data: URL, such as data:image/png;base64,…; addresses are not fetched")
    media_type, _, is_base64, payload = found.groups()
    try:
        content = base64.b64decode(payload, validate=True) if is_base64 else unquote_to_bytes(payload)
    except (binascii.Error, ValueError):
        raise InvalidValue(where, payload[:40], "base64 that can be read") from None
    return File(name, media_type.lower(), content, where)
