"""`chat-start`: the entry of a chat into a graph.

Outputs the user's latest message as text, and the conversation so far as a list. The agents it leads to receive the
conversation without it; the list is for other nodes. Outside of a chat, the run's input is used instead: a text, or an
object with `messages`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.errors import InvalidValue
from penstock.kernel.executor import DataValue, ExecutionResult, Handle, as_text
from penstock.nodes.parts.chat import messages_in, newest
from penstock.nodes.parts.services import runtime_of
from penstock.runtime.graphs.graph_runtime import FlowContext
from penstock.runtime.graphs.settings import Checked, Data, Flag, Settings

ROLES = ("system", "user", "assistant")


@dataclass(frozen=True, slots=True)
class ChatStartData(Data):
    """What the agents it leads to receive from the user."""

    includeUserTools: Flag = False
    """Whether they receive the user's own tools, even with other nodes in between."""


class ChatStart(Checked[ChatStartData]):
    """Outputs the user's latest message."""

    settings = Settings(ChatStartData)
    is_pure = True
    inputs = ()
    outputs = (Handle("output", "text"), Handle("messages", "list"))

    def execute(
        self, data: Mapping[str, Any], inputs: Mapping[str, DataValue], context: FlowContext
    ) -> ExecutionResult:
        """Return the user's latest message, and all messages if an edge uses them."""
        self.settings.read(data)
        messages = messages_in(context) or as_messages(context.execution.input)
        outputs = {"output": DataValue("text", newest(messages))}
        if runtime_of(context).outgoing_edges(str(context.node_id), "flow", "messages"):
            # Only then: outputs are stored, and each turn would store the whole conversation again.
            outputs["messages"] = DataValue("list", [dict(message) for message in messages])
        return ExecutionResult(outputs)


def as_messages(input: Any) -> list[Mapping[str, Any]]:
    """Return the input of a run without a chat as messages."""
    if not isinstance(input, Mapping) or "messages" not in input:
        return [{"role": "user", "content": as_text(input)}]
    messages = input["messages"]
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        raise InvalidValue("messages", messages, "a list of objects with role and content")
    return [_message(message, at) for at, message in enumerate(messages)]


def _message(given: Any, at: int) -> Mapping[str, Any]:
    if not isinstance(given, Mapping) or given.get("role") not in ROLES or not isinstance(given.get("content"), str):
        raise InvalidValue(f"messages[{at}]", given, f"an object with a role ({', '.join(ROLES)}) and content, a text")
    return {"role": given["role"], "content": given["content"]}
