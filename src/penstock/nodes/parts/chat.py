"""The prompt of an agent, from the chat or the node's input, and the pieces of its answer.

The service `chat_scope` decides: agents that the user talks to receive the conversation in the service `chat_input`,
all others only their input. Attachments are loaded here by the service `attachments`, and not earlier: their bytes are
in no value of the flow, in no event and in no journal.

Knows no store and no particular chat; without these services every agent receives only its input.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.agents.loop import OnDelta
from penstock.agents.messages import ContentPart, Delta, Media, Message, TextDelta, ToolCall, ToolResult
from penstock.agents.tools import ToolChain, as_tool
from penstock.kernel.executor import DataValue, as_text
from penstock.nodes.parts.services import CombinedTools, combine_tools, flatten_tools, offered_tool
from penstock.runtime.context import ExecutionContext
from penstock.runtime.graphs.graph_runtime import FlowContext
from penstock.runtime.graphs.node_execution import EmitProgress, ProgressStream

Answering = Callable[[ExecutionContext, OnDelta], Awaitable[DataValue]]
"""Requests an answer in a context, emits its pieces, and returns it."""

Load = Callable[[str], Awaitable[bytes | None]]
"""Returns the bytes of the attachment with an id; None if there are none."""

MAX_ATTACHED_BYTES = 50 * 1024 * 1024
"""Total size of attachments passed to an agent, newest first; older ones are only named."""
MAX_ATTACHED_TEXT = 200_000
"""Maximum number of characters of one attached text."""

GO_ON = "Go on exactly where your last message stops. Do not repeat anything of it, and do not comment on this."
"""Prompt if the last message is the agent's own: not every model continues without one."""

AS_MEDIA = ("image/", "audio/", "application/pdf")
AS_TEXT = ("text/", "application/json", "application/xml", "application/yaml", "application/x-yaml")


@dataclass(frozen=True, slots=True)
class Prompt:
    """The prompt of an agent, and the messages before it."""

    text: str
    history: Sequence[Message] = ()


async def prompt_for(inputs: Mapping[str, DataValue], context: FlowContext) -> Prompt:
    """Return the prompt of this node's agent: from the chat if the user talks to it, else from its input."""
    given = inputs["input"].value if "input" in inputs else context.execution.input
    messages = messages_in(context) if _is_entry(context) else []
    if not messages:
        return Prompt(as_text(given))
    history = await _for_model(messages, context)
    if given is not None and given != messages and given != newest(messages):
        return Prompt(as_text(given), history)  # an upstream node changed the message: pass both
    is_own = messages[-1]["role"] == "assistant" and "tool_round" not in messages[-1]
    return Prompt(GO_ON if is_own else "", history)


async def history_before(context: FlowContext) -> list[Message]:
    """Return the conversation before the newest user message, if the user talks to this node; else nothing."""
    messages = messages_in(context) if _is_entry(context) else []
    users = [at for at, message in enumerate(messages) if message["role"] == "user"]
    return await _for_model(messages[: users[-1]], context) if users else []


def messages_in(context: FlowContext) -> list[Mapping[str, Any]]:
    """Return the messages of the chat that this run answers, as `role` and `content`; empty without a chat."""
    given = context.services.get("chat_input")
    # Checking for dict first is faster than the abstract class.
    messages = given.get("messages") if isinstance(given, (dict, Mapping)) else None
    return [] if messages is None else list(messages)


def newest(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return the user's latest message."""
    return next((str(message["content"]) for message in reversed(messages) if message["role"] == "user"), "")


def with_user_tools(own: ToolChain, context: FlowContext) -> ToolChain:
    """Return the agent's tools and, if the chat includes them, the user's; on a name clash the agent's own wins."""
    scope = context.services.get("chat_scope")
    if scope is None or not scope.include_user_tools(str(context.node_id)):
        return own
    taken = {spec.name for spec in own.specs}
    return combine_tools([own, *_of_other_names(context, taken)])


def _of_other_names(context: FlowContext, taken: set[str]) -> Iterator[Any]:
    for given in context.services.get("user_tools") or ():
        for tool in flatten_tools(offered_tool(given, context) if isinstance(given, str) else given):
            if isinstance(tool, ToolChain):
                yield CombinedTools([tool], [spec.name for spec in tool.specs if spec.name not in taken])
                taken.update(spec.name for spec in tool.specs)
            elif as_tool(tool).name not in taken:
                taken.add(tool.name)
                yield tool


def _is_entry(context: FlowContext) -> bool:
    scope = context.services.get("chat_scope")
    return scope is not None and bool(scope.is_entry_agent(str(context.node_id)))


async def _for_model(messages: Sequence[Mapping[str, Any]], context: FlowContext) -> list[Message]:
    """Convert the messages for a model, newest first, so that the newest attachments use the byte limit."""
    load: Load | None = context.services.get("attachments")
    left = MAX_ATTACHED_BYTES
    converted: list[Message] = []
    for message in reversed(messages):
        if (tool_round := message.get("tool_round")) is not None:
            converted += reversed(_tool_round(tool_round))
            continue
        parts: list[ContentPart] = []
        for attached in message.get("attachments") or ():
            content = None
            if load is not None and attached["size"] <= left and _is_readable(attached["media_type"]):
                content = await load(attached["id"])
                left -= attached["size"]
            parts.append(_part(attached, content))
        text = str(message["content"])
        converted.append(Message(message["role"], [*([text] if text else []), *parts] if parts else text))
    return converted[::-1]


def _tool_round(given: Mapping[str, Any]) -> list[Message]:
    """Return an earlier answer with its tool calls, and their results."""
    calls = [ToolCall(call["id"], call["name"], call["arguments"]) for call in given["calls"]]
    results = [ToolResult(call["id"], call["name"], call["result"]) for call in given["calls"]]
    return [Message.assistant(given["text"], calls), *map(Message.tool, results)]


def _is_readable(media_type: str) -> bool:
    return media_type.startswith(AS_MEDIA + AS_TEXT)


def _part(attached: Mapping[str, Any], content: bytes | None) -> ContentPart:
    name, media_type = attached["name"], attached["media_type"]
    if content is None:
        return f"\n[{name} ({media_type}, {attached['size']} bytes) is attached, and cannot be shown]"
    if media_type.startswith(AS_MEDIA):
        return Media(media_type, data=content)
    text = content.decode("utf-8", "replace")
    cut = f"\n[the first {MAX_ATTACHED_TEXT} of {len(text)} characters]" if len(text) > MAX_ATTACHED_TEXT else ""
    return f"\n[{name} is attached:]\n{text[:MAX_ATTACHED_TEXT]}{cut}"


def streamed(place: ExecutionContext, answering: Answering) -> ProgressStream:
    """Return the answer, with its pieces emitted as `delta` events."""

    def work(place: ExecutionContext, emit: EmitProgress) -> Awaitable[DataValue]:
        return answering(place, lambda delta: emit("delta", delta_event(delta)))

    return ProgressStream(place, work)


def delta_event(delta: Delta) -> dict[str, object]:
    """Return a piece of an answer as the data of a `delta` event."""
    if isinstance(delta, TextDelta):
        return {"text": delta.text, "source": delta.source}
    call = {"id": delta.call.id, "name": delta.call.name, "arguments": delta.call.arguments}
    return {"tool_call": call, "source": delta.source}
