"""What requests to /v1 may say.

Fields that mean something here are declared, and checked. Anything else that OpenAI's API knows, or will know, is
accepted and named in `ignored`, so that a client can see what had no effect. Knows nothing of graphs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, FiniteFloat, StrictBool, StringConstraints

MAX_MESSAGES = 10_000
MAX_METADATA = 16


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
Count = Annotated[int, Field(ge=1, le=2**53)]


class Extension(BaseModel):
    """What only Penstock knows, in the body field `penstock`."""

    model_config = ConfigDict(extra="forbid")

    limits: dict[str, Any] | None = None
    """What the run may use, such as {"max_cost_usd": "0.10"}."""
    run_id: Id | None = None
    """The id of the run; asking again with the same id and the same request gives the same run."""
    on_disconnect: Literal["cancel", "continue"] = "cancel"
    """What becomes of the run when the client leaves before its end."""


class ImageUrl(BaseModel):
    """A picture, as a data: URL."""

    url: Text
    detail: Text | None = None


class Part(BaseModel):
    """A piece of a message's content, of /v1/chat/completions and of /v1/responses alike."""

    model_config = ConfigDict(extra="allow")

    type: Text
    text: Text | None = None
    refusal: Text | None = None
    image_url: ImageUrl | Text | None = None
    file_data: Text | None = None
    filename: Text | None = None


class Function(BaseModel):
    """The name and the arguments of a tool call."""

    name: Text = ""
    arguments: Text = ""


class ToolCallMade(BaseModel):
    """A tool call that an earlier answer asked for."""

    model_config = ConfigDict(extra="allow")

    id: Text = ""
    function: Function = Function()


class ChatMessageBody(BaseModel):
    """One message of the conversation."""

    model_config = ConfigDict(extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Text | list[Part] | None = None
    name: Text | None = None
    tool_calls: list[ToolCallMade] | None = None
    tool_call_id: Text | None = None


class StreamOptions(BaseModel):
    """How a stream is told."""

    model_config = ConfigDict(extra="allow")

    include_usage: StrictBool = False


class ResponseFormat(BaseModel):
    """What form the answer is to have; the graph decides that."""

    model_config = ConfigDict(extra="allow")

    type: Text


class _Body(BaseModel):
    """What both kinds of requests say."""

    model_config = ConfigDict(extra="allow")

    model: Annotated[Text, StringConstraints(min_length=1, max_length=200)]
    """The id of a graph; `graph@3` for its third version."""
    stream: StrictBool = False
    temperature: Annotated[FiniteFloat, Field(ge=0, le=2)] | None = None
    top_p: Annotated[FiniteFloat, Field(ge=0, le=1)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Text | dict[str, Any] | None = None
    metadata: Metadata | None = None
    user: Text | None = None
    penstock: Extension = Extension()

    def ignored(self, *, is_heard: bool = True) -> list[str]:
        """The fields that were given and have no effect here, by name.

        Of a conversation that is not heard, because the graph has no part in one, only the last message has any.
        """
        given = {name for name in self.model_fields_set if getattr(self, name) is not None}
        return sorted(given & NO_EFFECT | set(self.model_extra or ()))


NO_EFFECT = frozenset(
    {"temperature", "top_p", "tools", "user", "max_tokens", "max_completion_tokens", "max_output_tokens", "store"}
)
"""Declared, checked, and without effect: the graph says how its models are asked, and the server what it keeps."""


class ChatCompletionBody(_Body):
    """A request to /v1/chat/completions."""

    messages: Annotated[list[ChatMessageBody], Field(min_length=1, max_length=MAX_MESSAGES)]
    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    response_format: ResponseFormat | None = None

    def ignored(self, *, is_heard: bool = True) -> list[str]:
        """The fields that have no effect."""
        return sorted([*super().ignored(), *(() if is_heard else _all_but_last("messages", self.messages))])


class InputItem(BaseModel):
    """One item of what /v1/responses is given: a message, or something an earlier response held."""

    model_config = ConfigDict(extra="allow")

    type: Text = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: Text | list[Part] | None = None
    name: Text | None = None
    arguments: Text | None = None
    output: Any = None


UNHEARD = frozenset({"reasoning"})
"""Items that an earlier response held and that say nothing to anybody here."""


class TextOptions(BaseModel):
    """What form the answer is to have; the graph decides that."""

    model_config = ConfigDict(extra="allow")

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
        """The fields that have no effect; `instructions` among them, if the conversation has begun before."""
        counts = is_heard and self.previous_response_id is None
        ignored = [*super().ignored(), *(["instructions"] if self.instructions and not counts else [])]
        if isinstance(self.input, list):
            unheard = [f"input.{at}" for at, item in enumerate(self.input) if item.type in UNHEARD]
            ignored += unheard if is_heard else _all_but_last("input", self.input)
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


class ErrorAnswer(BaseModel):
    """Every answer that is no success."""

    error: ErrorFacts
