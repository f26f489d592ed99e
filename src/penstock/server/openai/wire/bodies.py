"""What requests to /v1 may say.

Fields that mean something here are declared, and checked. Anything else that OpenAI's API knows, or will know, is
accepted and named in `ignored`, so that a client can see what had no effect. What is null was not given, as clients
mean it that send every field they know. Knows nothing of graphs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal

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

MAX_MESSAGES = 10_000
MAX_METADATA = 16
EMPTY: tuple[Any, ...] = ("", [], {})
"""What says nothing, in a field that is not known."""


def _writable(text: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError("has half of a surrogate pair, which is no text") from None
    return text


Text = Annotated[str, AfterValidator(_writable)]
Id = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:-]{0,99}$")]
Metadata = Annotated[
    dict[Annotated[Text, StringConstraints(max_length=64)], Annotated[Text, StringConstraints(max_length=512)]],
    Field(max_length=MAX_METADATA),
]
Count = Annotated[StrictInt, Field(ge=1, le=2**53)]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]


class Given(BaseModel):
    """What a client sends."""

    model_config = ConfigDict(extra="allow")

    without_effect: ClassVar[frozenset[str]] = frozenset()
    """Fields that are checked, and say nothing to anybody here."""

    def unheard(self) -> Iterator[str]:
        """What of it says nothing to anybody here, by its place."""
        yield from self.model_fields_set & self.without_effect
        yield from (name for name, said in (self.model_extra or {}).items() if said not in EMPTY)
        for name in type(self).model_fields:
            yield from unheard_in(name, getattr(self, name))

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, sent: Any) -> Any:
        return {name: one for name, one in sent.items() if one is not None} if isinstance(sent, dict) else sent


def unheard_in(where: str, said: Any) -> Iterator[str]:
    """What of a field says nothing to anybody here; what many in a list have, once."""
    if isinstance(said, Given):
        yield from (f"{where}.{name}" for name in said.unheard())
    elif isinstance(said, list):
        inside = {name for one in said if isinstance(one, Given) for name in one.unheard()}
        yield from (f"{where}.*.{name}" for name in inside)


class Extension(Given):
    """What only Penstock knows, in the body field `penstock`."""

    model_config = ConfigDict(extra="forbid")

    limits: dict[str, Any] | None = None
    """What the run may use, such as {"max_cost_usd": "0.10"}."""
    run_id: Id | None = None
    """The id of the run; asking again with the same id and the same request gives the same run."""
    on_disconnect: Literal["cancel", "continue"] = "cancel"
    """What becomes of the run when the client leaves before its end."""


class ImageUrl(Given):
    """A picture, as a data: URL."""

    without_effect = frozenset({"detail"})

    url: Text
    detail: Text | None = None


class FileGiven(Given):
    """A file, as a data: URL."""

    file_data: Text | None = None
    filename: Text | None = None


class Part(Given):
    """A piece of a message's content, of /v1/chat/completions and of /v1/responses alike."""

    type: Text
    text: Text | None = None
    refusal: Text | None = None
    image_url: ImageUrl | Text | None = None
    file: FileGiven | None = None
    """As /v1/chat/completions has it; in /v1/responses the two fields of a file are the part's own."""
    file_data: Text | None = None
    filename: Text | None = None


class Function(Given):
    """The name of a tool that was called, and what it was given: `input`, if it takes text and no arguments."""

    name: Text = ""
    arguments: Text = ""
    input: Text = ""


class ToolCallMade(Given):
    """A tool call that an earlier answer asked for; what was called stands under its type."""

    id: Text = ""
    type: Text = ""
    function: Function | None = None
    custom: Function | None = None


class ChatMessageBody(Given):
    """One message of the conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Text | list[Part] | None = None
    refusal: Text | None = None
    name: Text | None = None
    tool_calls: list[ToolCallMade] | None = None
    tool_call_id: Text | None = None
    function_call: Function | None = None
    """The one tool call of a message, as it was said before there were several."""

    def unheard(self) -> Iterator[str]:
        """Its fields that say nothing to anybody here; of a tool's result, the name is told."""
        if self.name and self.role not in ("tool", "function"):
            yield "name"
        yield from super().unheard()


class StreamOptions(Given):
    """How a stream is told."""

    include_usage: StrictBool = False


class ResponseFormat(Given):
    """What form the answer is to have; the graph decides that."""

    type: Text


class _Body(Given):
    """What both kinds of requests say."""

    model: Annotated[Text, StringConstraints(min_length=1, max_length=200)]
    """The id of a graph; `graph@3` for its third version."""
    stream: StrictBool = False
    temperature: Annotated[Number, Field(ge=0, le=2)] | None = None
    top_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Text | dict[str, Any] | None = None
    metadata: Metadata | None = None
    user: Text | None = None
    penstock: Extension = Extension()

    def ignored(self, *, is_heard: bool = True) -> list[str]:
        """The fields that were given and have no effect here, by name.

        Of a conversation that is not heard, because the graph has no part in one, only the last message has any; nor
        does it matter then who the `user` is.
        """
        without = NO_EFFECT if is_heard else NO_EFFECT | {"user"}
        return sorted(self.model_fields_set & without | set(self.model_extra or ()))


NO_EFFECT = frozenset(
    {"temperature", "top_p", "tools", "max_tokens", "max_completion_tokens", "max_output_tokens", "store"}
)
"""Declared, checked, and without effect: the graph says how its models are asked, and the server what it keeps."""


class ChatCompletionBody(_Body):
    """A request to /v1/chat/completions."""

    messages: Annotated[list[ChatMessageBody], Field(min_length=1, max_length=MAX_MESSAGES)]
    stream_options: StreamOptions | None = None
    n: StrictInt | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    response_format: ResponseFormat | None = None

    def ignored(self, *, is_heard: bool = True) -> list[str]:
        """The fields that have no effect; one that many messages have is named once."""
        within = [*unheard_in("messages", self.messages), *unheard_in("stream_options", self.stream_options)]
        within += unheard_in("response_format", self.response_format)
        within += [] if is_heard else _all_but_last("messages", self.messages)
        return sorted([*super().ignored(is_heard=is_heard), *within])


class InputItem(Given):
    """One item of what /v1/responses is given: a message, or something an earlier response held."""

    type: Text = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: Text | list[Part] | None = None
    name: Text | None = None
    arguments: Text | None = None
    input: Text | None = None
    """What a tool was given that takes text and no arguments."""
    output: Text | list[Part] | None = None
    call_id: Text | None = None

    def unheard(self) -> Iterator[str]:
        """Its fields that say nothing to anybody here; of a tool, the name is told."""
        if self.name and self.type == "message":
            yield "name"
        yield from super().unheard()


UNHEARD = frozenset({"reasoning"})
"""Items that an earlier response held and that say nothing to anybody here."""


class TextOptions(Given):
    """What form the answer is to have; the graph decides that."""

    format: ResponseFormat | None = None


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

    def ignored(self, *, is_heard: bool = True) -> list[str]:
        """The fields that have no effect; also `instructions` and `user`, if the conversation has begun before."""
        counts = is_heard and self.previous_response_id is None
        ignored = [*super().ignored(is_heard=counts), *unheard_in("text", self.text)]
        ignored += ["instructions"] if self.instructions and not counts else []
        if isinstance(self.input, list):
            unheard = [f"input.{at}" for at, item in enumerate(self.input) if item.type in UNHEARD]
            ignored += unheard if is_heard else _all_but_last("input", self.input)
            ignored += unheard_in("input", [item for item in self.input if item.type not in UNHEARD])
        return sorted(ignored)


def _all_but_last(where: str, said: Sequence[object]) -> list[str]:
    """The messages before the last one, by their place; of many, from the first to the last of them."""
    before = len(said) - 1
    return [] if not before else [f"{where}.0"] if before == 1 else [f"{where}.0-{before - 1}"]


class ErrorFacts(BaseModel):
    """What went wrong, as clients of OpenAI's API read it."""

    message: str
    type: str
    param: str | None = None
    """Which field of the request it is about."""
    code: str | None = None
    run_id: str | None = None
    """The run that came to no answer, if there was one."""
    penstock: dict[str, Any] | None = None
    """What became of it, and what it has used."""


class ErrorAnswer(BaseModel):
    """Every answer that is no success."""

    error: ErrorFacts
