"""What an agent is asked in a chat: what was said so far, or what the flow brings it.

Which one it is, the service `chat_scope` says: the agents that the user talks to are given the conversation that stands
in the service `chat_input`, all others what comes in and nothing else. What was attached is fetched by the service
`attachments`, here and not before: bytes are in no value that flows, in no event and in no journal.

Knows no store and no chat of anybody's; without these services every agent is asked what comes in.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.agents.messages import ContentPart, Media, Message
from penstock.agents.tools import ToolChain, as_tool
from penstock.kernel.values import DataValue
from penstock.nodes.parts.toolbox import Chained, gathered, offered, pieces
from penstock.nodes.parts.values import as_text
from penstock.runtime.graphs.flow_context import FlowContext

Load = Callable[[str], Awaitable[bytes | None]]
"""The bytes that were attached under an id; None if there are none."""

MAX_ATTACHED_BYTES = 50 * 1024 * 1024
"""So much is shown to an agent, the newest first; what is older is named only."""
MAX_ATTACHED_TEXT = 200_000
"""So many characters of one text that was attached."""

GO_ON = "Go on exactly where your last message stops. Do not repeat anything of it, and do not comment on this."
"""What an agent is asked if the last thing said is its own: not every model goes on by itself."""

AS_MEDIA = ("image/", "audio/", "application/pdf")
AS_TEXT = ("text/", "application/json", "application/xml", "application/yaml", "application/x-yaml")


@dataclass(frozen=True, slots=True)
class Question:
    """What an agent is asked, and what was said before."""

    prompt: str
    history: Sequence[Message] = ()


async def question(inputs: Mapping[str, DataValue], context: FlowContext) -> Question:
    """What the agent of this node is asked: by the user, if it is one that the user talks to; else by the flow."""
    given = inputs["input"].value if "input" in inputs else context.execution.input
    said = messages_in(context) if _is_entry(context) else []
    if not said:
        return Question(as_text(given))
    history = await _told(said, context)
    if given is not None and given != said and given != newest(said):
        return Question(as_text(given), history)  # made of what was said by a node between: both are told
    return Question(GO_ON if said[-1]["role"] == "assistant" else "", history)


def messages_in(context: FlowContext) -> list[Mapping[str, Any]]:
    """What was said in the chat that this run answers, as `role` and `content`; empty if it answers none."""
    given = context.services.get("chat_input")
    said = given.get("messages") if isinstance(given, (dict, Mapping)) else None  # a dict is told at once
    return [] if said is None else list(said)


def newest(said: Sequence[Mapping[str, Any]]) -> str:
    """The last thing that the user said."""
    return next((str(one["content"]) for one in reversed(said) if one["role"] == "user"), "")


def with_user_tools(own: ToolChain, context: FlowContext) -> ToolChain:
    """The agent's tools and, where the chat gives them to it, the user's; of two of one name the agent's own counts."""
    scope = context.services.get("chat_scope")
    if scope is None or not scope.include_user_tools(str(context.node_id)):
        return own
    taken = {spec.name for spec in own.specs}
    return gathered([own, *_of_other_names(context, taken)])


def _of_other_names(context: FlowContext, taken: set[str]) -> Iterator[Any]:
    for given in context.services.get("user_tools") or ():
        for one in pieces(offered(given, context) if isinstance(given, str) else given):
            if isinstance(one, ToolChain):
                yield Chained([one], [spec.name for spec in one.specs if spec.name not in taken])
                taken.update(spec.name for spec in one.specs)
            elif as_tool(one).name not in taken:
                taken.add(one.name)
                yield one


def _is_entry(context: FlowContext) -> bool:
    scope = context.services.get("chat_scope")
    return scope is not None and bool(scope.is_entry_agent(str(context.node_id)))


async def _told(said: Sequence[Mapping[str, Any]], context: FlowContext) -> list[Message]:
    """The messages as models take them, from the newest back, because that is how far the bytes reach."""
    load: Load | None = context.services.get("attachments")
    left = MAX_ATTACHED_BYTES
    told: list[Message] = []
    for one in reversed(said):
        parts: list[ContentPart] = []
        for attached in one.get("attachments") or ():
            shown = None
            if load is not None and attached["size"] <= left and _is_readable(attached["media_type"]):
                shown = await load(attached["id"])
                left -= attached["size"]
            parts.append(_part(attached, shown))
        text = str(one["content"])
        told.append(Message(one["role"], [*([text] if text else []), *parts] if parts else text))
    return told[::-1]


def _is_readable(media_type: str) -> bool:
    return media_type.startswith(AS_MEDIA + AS_TEXT)


def _part(attached: Mapping[str, Any], content: bytes | None) -> ContentPart:
    name, media_type = attached["name"], attached["media_type"]
    if content is None:
        return f"\n[{name} ({media_type}, {attached['size']} bytes) is attached, and cannot be shown here]"
    if media_type.startswith(AS_MEDIA):
        return Media(media_type, data=content)
    text = content.decode("utf-8", "replace")
    cut = f"\n[the first {MAX_ATTACHED_TEXT} of {len(text)} characters]" if len(text) > MAX_ATTACHED_TEXT else ""
    return f"\n[{name} is attached:]\n{text[:MAX_ATTACHED_TEXT]}{cut}"
