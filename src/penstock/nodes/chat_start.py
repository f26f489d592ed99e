"""`chat-start`: where a chat enters a graph.

What the user said last goes on as text, and everything that was said so far as a list. The agents it leads to are given
the conversation by themselves; the list is for other nodes. Outside of a chat, what the run was given stands for it: a
text, or an object with `messages`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.errors import InvalidValue
from penstock.kernel.executor import ExecutionResult, Handle
from penstock.kernel.values import DataValue
from penstock.nodes.parts.chat import messages_in, newest
from penstock.nodes.parts.nested import runtime_of
from penstock.nodes.parts.settings import Checked, Data, Flag, Settings
from penstock.nodes.parts.values import as_text
from penstock.runtime.graphs.flow_context import FlowContext

SAID_BY = ("system", "user", "assistant")


@dataclass(frozen=True, slots=True)
class ChatStartData(Data):
    """What the agents it leads to may use of the user's."""

    includeUserTools: Flag = False
    """Whether they are given the user's own tools, through whatever stands between."""


class ChatStart(Checked[ChatStartData]):
    """Gives what the user said."""

    settings = Settings(ChatStartData)
    is_pure = True
    inputs = ()
    outputs = (Handle("output", "text"), Handle("messages", "list"))

    def execute(
        self, data: Mapping[str, Any], inputs: Mapping[str, DataValue], context: FlowContext
    ) -> ExecutionResult:
        """The newest thing that the user said; all that was said, if an edge wants it."""
        self.settings.read(data)
        said = messages_in(context) or as_messages(context.execution.input)
        outputs = {"output": DataValue("text", newest(said))}
        if runtime_of(context).outgoing_edges(str(context.node_id), "flow", "messages"):
            # Only then: outputs are written down, and each turn would write down the whole conversation again.
            outputs["messages"] = DataValue("list", [dict(one) for one in said])
        return ExecutionResult(outputs)


def as_messages(input: Any) -> list[Mapping[str, Any]]:
    """What a run was given where a chat enters, as messages."""
    if not isinstance(input, Mapping) or "messages" not in input:
        return [{"role": "user", "content": as_text(input)}]
    messages = input["messages"]
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        raise InvalidValue("messages", messages, "a list of objects with role and content")
    return [_message(one, at) for at, one in enumerate(messages)]


def _message(one: Any, at: int) -> Mapping[str, Any]:
    if not isinstance(one, Mapping) or one.get("role") not in SAID_BY or not isinstance(one.get("content"), str):
        raise InvalidValue(f"messages[{at}]", one, f"an object with a role ({', '.join(SAID_BY)}) and content, a text")
    return {"role": one["role"], "content": one["content"]}
