"""Requests to /v1: their schemas, and the conversation in them: turns with a role, text, pictures and files.

Supported fields are declared and validated. Any other field of OpenAI's API, present or future, is accepted and listed
in `ignored`, so that a client can see what had no effect. A null field counts as absent, because some clients send
every field they know.

Tool calls of earlier answers and their results are turns with text; `with_rounds` joins the calls of the client's own
tools and their results to one turn that keeps their ids. `options` reads the options for the model. Pictures and
files are accepted only as `data:` URLs; no URL is fetched. Knows no graphs.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Literal
from urllib.parse import unquote_to_bytes

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StrictBool,
    StrictInt,
    StringConstraints,
    model_validator,
)

from penstock.agents.messages import Role
from penstock.chat import conversation
from penstock.errors import InvalidValue
from penstock.server.schemas import MEDIA_TYPE

MAX_MESSAGES = 10_000
MAX_METADATA = 16
EMPTY: tuple[Any, ...] = ("", [], {})
"""Values of an unknown field that are not reported as ignored."""
SHOWN_IDS = 10
"""Maximum number of ids in a message."""
CALL_ID = re.compile(r"call_([0-9a-f]{32})([0-9a-f]{2})")
TEXT_PARTS = frozenset({"text", "input_text", "output_text"})
OWN_TOOLS = "this response waits for no such result: the calls of the graph's own tools are already done"
DATA_URL = re.compile(
    rf"data:({MEDIA_TYPE.strip('^$')})((?:;[\w-]+=[^;,]*)*)(;base64)?,(.*)", re.DOTALL | re.ASCII | re.IGNORECASE
)


def _writable(text: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError("contains an unpaired surrogate, which is not valid text") from None
    return text


Text = Annotated[str, AfterValidator(_writable)]
Id = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:-]{0,99}$")]
Metadata = Annotated[
    dict[Annotated[Text, StringConstraints(max_length=64)], Annotated[Text, StringConstraints(max_length=512)]],
    Field(max_length=MAX_METADATA),
]
Count = Annotated[StrictInt, Field(ge=1, le=2**53)]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]


class InvalidPart(InvalidValue):
    """A part of a request that conflicts with others, such as a repeated name; its message is the problem."""

    def __init__(self, field: str, value: object, problem: str) -> None:
        super().__init__(field, value, problem)
        self.args = (f"{field}: {problem}",)


class RequestObject(BaseModel):
    """An object in a request."""

    model_config = ConfigDict(extra="allow")

    without_effect: ClassVar[frozenset[str]] = frozenset()
    """Fields that are validated but have no effect."""

    def ignored_fields(self) -> Iterator[str]:
        """Yield the paths of the fields that have no effect."""
        yield from self.model_fields_set & self.without_effect
        yield from (name for name, value in (self.model_extra or {}).items() if value not in EMPTY)
        for name in type(self).model_fields:
            yield from ignored_in(name, getattr(self, name))

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, sent: Any) -> Any:
        return {name: value for name, value in sent.items() if value is not None} if isinstance(sent, dict) else sent


def ignored_in(where: str, value: Any) -> Iterator[str]:
    """Yield the paths inside a field that have no effect; a path shared by several list items only once."""
    if isinstance(value, RequestObject):
        yield from (f"{where}.{name}" for name in value.ignored_fields())
    elif isinstance(value, list):
        inside = {name for item in value if isinstance(item, RequestObject) for name in item.ignored_fields()}
        yield from (f"{where}.*.{name}" for name in inside)


class Extension(RequestObject):
    """Penstock's own options, in the body field `penstock`."""

    model_config = ConfigDict(extra="forbid")

    limits: dict[str, Any] | None = None
    """Limits of the run, such as {"max_cost_usd": "0.10"}."""
    run_id: Id | None = None
    """The id of the run; the same request with the same id returns the existing run."""
    on_disconnect: Literal["cancel", "continue"] | None = None
    """What to do with the run if the client disconnects before its end; by default it is cancelled, unless the request
    has an `Idempotency-Key`."""


class ImageUrl(RequestObject):
    """A picture, as a data: URL."""

    without_effect = frozenset({"detail"})

    url: Text
    detail: Text | None = None


class FileObject(RequestObject):
    """A file, as a data: URL."""

    file_data: Text | None = None
    filename: Text | None = None


class Part(RequestObject):
    """A piece of a message's content, of /v1/chat/completions and of /v1/responses alike."""

    type: Text
    text: Text | None = None
    refusal: Text | None = None
    image_url: ImageUrl | Text | None = None
    file: FileObject | None = None
    """Used by /v1/chat/completions; in /v1/responses the two fields of a file are fields of the part."""
    file_data: Text | None = None
    filename: Text | None = None


class Function(RequestObject):
    """The name and arguments of a called tool; `input` if the tool takes text instead of arguments."""

    name: Text = ""
    arguments: Text = ""
    input: Text = ""


class EarlierToolCall(RequestObject):
    """A tool call of an earlier answer; the called tool is in the field named after its type."""

    id: Text = ""
    type: Text = ""
    function: Function | None = None
    custom: Function | None = None


class ChatMessageBody(RequestObject):
    """One message of the conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Text | list[Part] | None = None
    refusal: Text | None = None
    name: Text | None = None
    tool_calls: list[EarlierToolCall] | None = None
    tool_call_id: Text | None = None
    function_call: Function | None = None
    """The single tool call of a message, in the older format without `tool_calls`."""

    def ignored_fields(self) -> Iterator[str]:
        """Yield the fields that have no effect; `name` has one only in a tool result."""
        if self.name and self.role not in ("tool", "function"):
            yield "name"
        yield from super().ignored_fields()


class StreamOptions(RequestObject):
    """Options of a stream."""

    include_usage: StrictBool = False


class ResponseFormat(RequestObject):
    """Requested format of the answer."""

    type: Text
    json_schema: dict[str, Any] | None = None
    """Used by /v1/chat/completions; in /v1/responses its fields are fields of the format."""
    name: Text | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: StrictBool | None = None
    description: Text | None = None


class _Body(RequestObject):
    """Fields that both kinds of requests share."""

    model: Annotated[Text, StringConstraints(min_length=1, max_length=200)]
    """The id of a graph; `graph@3` for its third version."""
    stream: StrictBool = False
    temperature: Annotated[Number, Field(ge=0, le=2)] | None = None
    top_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Text | dict[str, Any] | None = None
    parallel_tool_calls: StrictBool | None = None
    metadata: Metadata | None = None
    user: Text | None = None
    penstock: Extension = Extension()

    def ignored(self, *, uses_history: bool = True) -> list[str]:
        """Return the names of the given fields that have no effect.

        `uses_history` is false for a graph that is not conversational: then only the last message has an effect, and
        `user` has none.
        """
        without = NO_EFFECT if uses_history else NO_EFFECT | {"user"}
        return sorted(self.model_fields_set & without | set(self.model_extra or ()))


NO_EFFECT = frozenset({"store"})
"""Fields validated but without effect: the server decides what it stores."""
Penalty = Annotated[Number, Field(ge=-2, le=2)]
Stop = Annotated[Text, StringConstraints(min_length=1, max_length=1_000)]


class ChatCompletionBody(_Body):
    """A request to /v1/chat/completions."""

    messages: Annotated[list[ChatMessageBody], Field(min_length=1, max_length=MAX_MESSAGES)]
    stream_options: StreamOptions | None = None
    n: StrictInt | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    seed: Annotated[StrictInt, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=4)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    reasoning_effort: Annotated[Text, StringConstraints(min_length=1, max_length=40)] | None = None
    response_format: ResponseFormat | None = None

    def ignored(self, *, uses_history: bool = True) -> list[str]:
        """Return the fields that have no effect; a field that several messages have is listed once."""
        within = [*ignored_in("messages", self.messages), *ignored_in("stream_options", self.stream_options)]
        within += ignored_in("response_format", self.response_format)
        within += [] if uses_history else _all_but_last("messages", self.messages)
        return sorted([*super().ignored(uses_history=uses_history), *within])


class InputItem(RequestObject):
    """One input item of /v1/responses: a message, or an output item of an earlier response."""

    type: Text = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: Text | list[Part] | None = None
    name: Text | None = None
    arguments: Text | None = None
    input: Text | None = None
    """The input of a tool that takes text instead of arguments."""
    output: Text | list[Part] | None = None
    call_id: Text | None = None

    def ignored_fields(self) -> Iterator[str]:
        """Yield the fields that have no effect; `name` has one only in items of tools."""
        if self.name and self.type == "message":
            yield "name"
        yield from super().ignored_fields()


IGNORED_ITEMS = frozenset({"reasoning"})
"""Types of items of earlier responses that have no effect."""


class TextOptions(RequestObject):
    """Requested format of the answer."""

    format: ResponseFormat | None = None
    verbosity: Text | None = None


class ReasoningOptions(RequestObject):
    """How much the model reasons."""

    effort: Annotated[Text, StringConstraints(min_length=1, max_length=40)] | None = None


class ResponseBody(_Body):
    """A request to /v1/responses."""

    input: Text | Annotated[list[InputItem], Field(min_length=1, max_length=MAX_MESSAGES)]
    instructions: Text | None = None
    previous_response_id: Annotated[Text, StringConstraints(min_length=1, max_length=200)] | None = None
    store: StrictBool | None = None
    background: StrictBool | None = None
    conversation: Any = None
    max_output_tokens: Count | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None

    def ignored(self, *, uses_history: bool = True) -> list[str]:
        """Return the fields that have no effect; also `instructions` and `user`, if `previous_response_id` is set."""
        is_used = uses_history and self.previous_response_id is None
        ignored = [*super().ignored(uses_history=is_used), *ignored_in("text", self.text)]
        ignored += ignored_in("reasoning", self.reasoning)
        ignored += ["instructions"] if self.instructions and not is_used else []
        if isinstance(self.input, list):
            items = [f"input.{at}" for at, item in enumerate(self.input) if item.type in IGNORED_ITEMS]
            ignored += items if uses_history else _all_but_last("input", self.input)
            ignored += ignored_in("input", [item for item in self.input if item.type not in IGNORED_ITEMS])
        return sorted(ignored)


def _all_but_last(where: str, messages: Sequence[object]) -> list[str]:
    """Return the path of the messages before the last one; of several messages, as one range."""
    before = len(messages) - 1
    return [] if not before else [f"{where}.0"] if before == 1 else [f"{where}.0-{before - 1}"]


@dataclass(frozen=True, slots=True)
class File:
    """A file or picture of a message."""

    name: str
    media_type: str
    content: bytes
    where: str = field(default="", compare=False)
    """The field of the request that contains it."""
    named_in: str = field(default="", compare=False)
    """The field of the request that names it."""


@dataclass(frozen=True, slots=True)
class EarlierCall:
    """A call of a function of the client."""

    id: str
    name: str
    arguments: str
    where: str
    """The field of the request that contains the id."""


@dataclass(frozen=True, slots=True)
class ToolOutput:
    """The result of a call of a function of the client."""

    call_id: str
    content: str
    where: str
    """The field of the request that contains the id."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One message of the conversation."""

    role: Role
    text: str
    files: tuple[File, ...] = field(default=())
    where: str = field(default="", compare=False)
    """The field of the request that contains the text."""
    is_tool_result: bool = field(default=False, compare=False)
    """Whether it is the result of a tool."""
    statement: str = field(default="", compare=False)
    """The text beside the tool calls."""
    calls: tuple[EarlierCall, ...] = field(default=(), compare=False)
    """The calls of the client's functions in an answer."""
    result: ToolOutput | None = field(default=None, compare=False)
    """The result of a function of the client."""
    tool_round: Mapping[str, Any] | None = field(default=None, compare=False)
    """The calls of one answer with their results, as a chat stores them; see `with_rounds`."""


def completion_turns(body: ChatCompletionBody) -> list[Turn]:
    """Return the conversation in `messages`; raise InvalidValue with the message that is not accepted."""
    turns = [_message_turn(message, f"messages.{at}") for at, message in enumerate(body.messages)]
    return _check_last(turns, "messages")


def response_turns(body: ResponseBody) -> list[Turn]:
    """Return the conversation in `instructions` and `input`; a continued one keeps its first instructions."""
    begins = body.previous_response_id is None
    turns = [Turn("system", body.instructions, where="instructions")] if body.instructions and begins else []
    if isinstance(body.input, str):
        turns.append(Turn("user", body.input, where="input"))
    else:
        turns.extend(
            _item_turn(item, f"input.{at}") for at, item in enumerate(body.input) if item.type not in IGNORED_ITEMS
        )
    return _check_last(turns, "input")


def check_lengths(turns: Sequence[Turn]) -> None:
    """Raise InvalidValue with the text or file that is too long for a chat, or the last message if it is empty."""
    for turn in turns:
        conversation.must_fit(turn.where, len(turn.text), conversation.MAX_CHARACTERS, "send fewer characters")
        for file in turn.files:
            conversation.must_fit(
                file.where, len(file.content), conversation.MAX_ATTACHMENT_BYTES, "send a smaller file, in bytes"
            )
    if not turns[-1].text and not turns[-1].files and turns[-1].tool_round is None:
        raise InvalidValue(turns[-1].where, turns[-1].text, "text, a picture or a file")


def check_supported(body: ChatCompletionBody | ResponseBody) -> None:
    """Raise InvalidValue for an unsupported option that would change the meaning of the answer."""
    if isinstance(body, ChatCompletionBody):
        if body.n not in (None, 1):
            raise InvalidValue("n", body.n, "1: a graph gives one answer")
    else:
        if body.conversation is not None:
            hint = "omitted: this server has no conversations by id; continue with previous_response_id"
            raise InvalidValue("conversation", body.conversation, hint)


def text_to_add(turns: Sequence[Turn], where: str) -> tuple[str, tuple[File, ...]]:
    """Join the next user messages of a stored conversation; raise InvalidValue for any other message."""
    for turn in turns:
        if turn.is_tool_result:
            raise InvalidValue(where, "the result of a tool", f"the next user message: {OWN_TOOLS}")
        if turn.role != "user":
            raise InvalidValue(where, turn.role, "the next user message: the server has the rest of the conversation")
    return "\n\n".join(turn.text for turn in turns), tuple(file for turn in turns for file in turn.files)


def _check_last(turns: list[Turn], where: str) -> list[Turn]:
    if not turns:
        raise InvalidValue(where, None, "at least one user message")
    if turns[-1].role != "user" and turns[-1].result is None:
        expected = "a conversation that ends with a user message, or with the results of your tools"
        raise InvalidValue(where, "the result of a tool" if turns[-1].is_tool_result else turns[-1].role, expected)
    return turns


def with_rounds(turns: Sequence[Turn]) -> list[Turn]:
    """Join the calls of each answer and their results to one turn, which a model gets as calls and results.

    Raise InvalidValue for a result without a call, for two results of one call, and for a call of this server that has
    no result. Other calls without results stay text, such as those that a graph's own tools have answered.
    """
    joined: list[Turn] = []
    at = 0
    while at < len(turns):
        if not turns[at].calls:
            joined.append(turns[at])
            at += 1
            continue
        end = at
        while end < len(turns) and turns[end].calls:
            end += 1
        first_result = end
        while end < len(turns) and turns[end].result is not None:
            end += 1
        joined += _round(turns[at:first_result], turns[first_result:end])
        at = end
    if (loose := joined[-1].result) is not None:
        raise InvalidValue(loose.where, loose.call_id, "a result that follows the answer with that tool call")
    return joined


def _round(answers: Sequence[Turn], results: Sequence[Turn]) -> list[Turn]:
    calls = [call for answer in answers for call in answer.calls]
    contents: dict[str, str] = {}
    known = {call.id for call in calls}
    for turn in results:
        given = turn.result
        assert given is not None
        if given.call_id in contents:
            raise InvalidPart(given.where, given.call_id, "this tool call has two results; send one for each call")
        if given.call_id not in known:
            listed = ", ".join(call.id for call in calls[:SHOWN_IDS])
            raise InvalidValue(given.where, given.call_id, f"the id of a tool call of the answer before it: {listed}")
        contents[given.call_id] = given.content
    missing = [call for call in calls if call.id not in contents]
    for call in missing:
        if results or parse_call_id(call.id) is not None:
            listed = ", ".join(one.id for one in missing[:SHOWN_IDS])
            raise InvalidPart(call.where, call.id, f"no result follows this tool call; send one for each of {listed}")
    if missing:
        return [*answers]
    listed_calls = [
        {"id": call.id, "name": call.name, "arguments": _arguments(call.arguments), "result": contents[call.id]}
        for call in calls
    ]
    statement = "\n".join(answer.statement for answer in answers if answer.statement)
    turns = [*answers, *results]
    return [
        Turn(
            "assistant",
            "\n".join(turn.text for turn in turns),
            tuple(file for turn in turns for file in turn.files),
            turns[-1].where,
            is_tool_result=True,
            tool_round={"text": statement, "calls": listed_calls},
        )
    ]


def _arguments(text: str) -> Any:
    """Return the arguments of a call as an object; as text if they are not one."""
    try:
        value = json.loads(text or "{}")
    except ValueError:
        return text
    return value if isinstance(value, dict) else text


def call_id(approval_id: str, index: int) -> str:
    """Return the id of a call of the client's tools: it identifies the stored question and the call in it."""
    return f"call_{approval_id.removeprefix('ap-')}{index:02x}"


def parse_call_id(id: str) -> tuple[str, int] | None:
    """Return the id of the stored question, and the index of the call in it; None if the id is not of this server."""
    found = CALL_ID.fullmatch(id)
    return None if found is None else (f"ap-{found[1]}", int(found[2], 16))


def _message_turn(message: ChatMessageBody, where: str) -> Turn:
    text, files = _content(message.content, f"{where}.content")
    if message.role in ("tool", "function"):
        named = message.name or message.tool_call_id or "a tool"
        id = message.tool_call_id if message.role == "tool" else None
        result = ToolOutput(id, text, f"{where}.tool_call_id") if id else None
        shown = _result_text(named, text)
        return Turn("assistant", shown, files, f"{where}.content", is_tool_result=True, result=result)
    calls = [call.function or call.custom or Function() for call in message.tool_calls or ()]
    calls += [message.function_call] if message.function_call else []
    texts = [_call_text(call.name, call.arguments or call.input) for call in calls]
    statement = text or message.refusal or ""
    text = "\n".join(part for part in (statement, *texts) if part)
    of_client = tuple(
        EarlierCall(call.id, call.function.name, call.function.arguments, f"{where}.tool_calls.{at}.id")
        for at, call in enumerate(message.tool_calls or ())
        if call.function is not None and call.id
    )
    is_usable = len(of_client) == len(calls)
    return Turn(
        _role(message.role),
        text,
        files,
        f"{where}.content",
        statement=statement,
        calls=of_client if is_usable else (),
    )


def _item_turn(item: InputItem, where: str) -> Turn:
    if item.type == "message":
        if item.role is None:
            raise InvalidValue(f"{where}.role", None, "user, assistant, system or developer")
        text, files = _content(item.content, f"{where}.content")
        return Turn(_role(item.role), text, files, f"{where}.content")
    text, files = _content(item.output, f"{where}.output")
    if item.type in ("function_call", "custom_tool_call", "mcp_call"):
        called = _call_text(item.name or "", item.arguments or item.input or "")
        result = [_result_text(item.name or "a tool", text)] if item.output is not None else []  # only for mcp_call
        is_function = item.type == "function_call" and item.call_id
        call = EarlierCall(item.call_id or "", item.name or "", item.arguments or "", f"{where}.call_id")
        return Turn(
            "assistant",
            "\n".join((called, *result)),
            files,
            f"{where}.arguments",
            calls=(call,) if is_function else (),
        )
    if item.type in ("function_call_output", "custom_tool_call_output"):
        result_text = _result_text(item.name or "a tool", text)
        id = item.call_id if item.type == "function_call_output" else None
        output = ToolOutput(id, text, f"{where}.call_id") if id else None
        return Turn("assistant", result_text, files, f"{where}.output", is_tool_result=True, result=output)
    if item.type == "item_reference":
        hint = "the item itself: items are not stored by id; continue with previous_response_id, or send the message"
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


def text_of_round(name: str, arguments: Any, result: str) -> str:
    """Return a tool call and its result as text."""
    return f"{_call_text(name, json.dumps(arguments, ensure_ascii=False))}\n{_result_text(name, result)}"


def _content(content: str | Iterable[Part] | None, where: str) -> tuple[str, tuple[File, ...]]:
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
            files.append(_file(part, f"{where}.{at}", len(files) + 1))
    return "\n".join(texts), tuple(files)


def _file(part: Part, where: str, number: int) -> File:
    if part.type in ("image_url", "input_image"):
        url = part.image_url if isinstance(part.image_url, str) else part.image_url.url if part.image_url else None
        return _parse_data_url(url, f"{where}.image_url", f"image-{number}")
    if part.type in ("file", "input_file"):
        inside, at = (part.file, f"{where}.file") if part.file is not None else (part, where)
        name = _last_part(inside.filename or "") or f"file-{number}"
        return replace(_parse_data_url(inside.file_data, f"{at}.file_data", name), named_in=f"{at}.filename")
    raise InvalidValue(f"{where}.type", part.type, "text, an image or a file")


def _last_part(path: str) -> str:
    """Return the file name alone: clients may send the file's path on their machine."""
    return path.replace("\\", "/").rpartition("/")[2]


def _parse_data_url(url: object, where: str, name: str) -> File:
    found = DATA_URL.fullmatch(url) if isinstance(url, str) else None
    if found is None:
        shown = url if not isinstance(url, str) else url[:40]
        raise InvalidValue(where, shown, "a data: URL, such as data:image/png;base64,…; addresses are not fetched")
    media_type, _, is_base64, payload = found.groups()
    try:
        content = base64.b64decode(payload, validate=True) if is_base64 else unquote_to_bytes(payload)
    except (binascii.Error, ValueError):
        raise InvalidValue(where, payload[:40], "valid base64") from None
    return File(name, media_type.lower(), content, where)
