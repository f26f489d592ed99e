"""Between a chat and a run: what a run is given of a conversation, and what a conversation is given of a run.

Pure. A run is given the messages on the way to its answer. Its answer is what the graph came to, as text; if it came to
nothing, because it failed or was stopped, what had been told of it by then.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Literal

from penstock.chat.message import MAX_CHARACTERS, ChatMessage
from penstock.chat.scope import CHAT_START_TYPES, services_for
from penstock.hosting.records import HostedEvent, RunRecord, RunStatus
from penstock.kernel.graph import GraphSpec
from penstock.money import to_usd
from penstock.nodes.chat_start import as_messages

State = Literal["writing", "complete", "partial", "failed", "halted"]

STATES: Mapping[RunStatus, State] = {
    "completed": "complete",
    "cancelled": "partial",
    "failed": "failed",
    "halted": "halted",
}
"""What an answer is when its run has ended; while it has not, it is being written."""

KIND = "chat"
"""The kind of origin of runs that answer somebody."""

INPUT_TYPES = frozenset({"input"})
"""Where a chat enters a graph that has no chat-start."""

MAX_ERROR = 2_000
CUT = "\n[cut]"


def unfinished(path: Iterable[ChatMessage]) -> list[str]:
    """The answers on a way through the conversation that are being written, and say nothing yet."""
    return [message.id for message in path if message.data.get("state") == "writing"]


def history_of(path: Iterable[ChatMessage], untold: Collection[str] = ()) -> list[dict[str, Any]]:
    """What was said on a way through the conversation, as models are told it; empty answers are left out.

    So are those that are `untold`: they were empty when the run was asked for, whatever they say by now.
    """
    told: list[dict[str, Any]] = []
    for message in path:
        attached = message.data.get("attachments")
        if (message.content or attached) and message.id not in untold:
            told.append({"role": message.role, "content": message.content})
            if attached:
                told[-1]["attachments"] = attached
    return told


def said_instead(history: Sequence[Mapping[str, Any]], given: Any) -> list[dict[str, Any]]:
    """The conversation with something else as the last thing that the user said, and nothing behind it.

    What was attached to it stays. An object with `messages` stands for the whole conversation, as where there is none.
    """
    messages = [dict(one) for one in as_messages(given)]
    if isinstance(given, Mapping) and "messages" in given:
        return messages
    said = [at for at, one in enumerate(history) if one["role"] == "user"]
    if not said:
        return [*map(dict, history), *messages]
    return [*map(dict, history[: said[-1]]), {**history[said[-1]], **messages[0]}]


def newest_text(history: Sequence[Mapping[str, Any]]) -> str:
    """The last thing that the user said."""
    return next((one["content"] for one in reversed(history) if one["role"] == "user"), "")


def chat_services(graph: GraphSpec) -> dict[str, Any]:
    """The services that make a run of `graph` one of a chat; InvalidValue if a chat has nowhere to enter it."""
    starts = [node.id for node in graph.nodes if node.type in CHAT_START_TYPES]
    return services_for(graph, starts or [node.id for node in graph.nodes if node.type in INPUT_TYPES])


def answer_text(output: Any) -> str:
    """What a graph came to, as an answer: text as it is; several texts one below the other; anything else as JSON."""
    if isinstance(output, Mapping) and output.keys() == {"output"}:
        output = output["output"]
    if output is None:
        return ""
    if isinstance(output, str):
        return as_content(output)
    if isinstance(output, Mapping) and output and all(isinstance(one, str) for one in output.values()):
        return as_content("\n\n".join(output.values()))
    return as_content(json.dumps(output, ensure_ascii=False, default=str))


def as_content(text: str, most: int = MAX_CHARACTERS) -> str:
    """Text as a message takes it: halves of surrogate pairs replaced, and cut where it is too long."""
    whole = text.encode("utf-8", "replace").decode()
    return whole if len(whole) <= most else whole[: most - len(CUT)] + CUT


def partial_text(events: Iterable[HostedEvent]) -> str:
    """What had been told of an answer: the pieces of the agent that spoke last, since it last began.

    A run that another worker took over tells an unfinished answer from its beginning. Of the agents inside one node it
    is the outermost that has said anything.
    """
    told: dict[str, dict[str, list[str]]] = {}
    is_stale = False
    for event in events:
        if event.type in ("run.started", "run.resumed"):
            is_stale = True  # until something new is told, what was told before is the best there is
        elif event.type == "text.delta" and event.data.get("text"):
            if is_stale:
                told, is_stale = {}, False
            node = told.pop(str(event.data.get("node_id")), {})
            node.setdefault(str(event.data.get("source")), []).append(str(event.data["text"]))
            told[str(event.data.get("node_id"))] = node
    if not told:
        return ""
    speakers = list(told.values())[-1]
    outermost = min(speakers, key=lambda source: source.count("/"))
    return as_content("".join(speakers[outermost]))


def writing(run_id: str) -> dict[str, Any]:
    """The data of an answer that is being written."""
    return {"state": "writing", "run_id": run_id, "cost_usd": 0.0, "attachments": []}


def written(run: RunRecord) -> dict[str, Any]:
    """The data of the answer of a run that has ended."""
    data = {"state": STATES[run.status], "run_id": run.id, "cost_usd": to_usd(run.cost_nanos), "attachments": []}
    if run.unknown_costs:
        data["unknown_costs"] = run.unknown_costs
    if run.error and run.status != "completed":
        data["error"] = as_content(run.error, MAX_ERROR)
    if run.stop_reason and run.status != "completed":
        data["stop_reason"] = run.stop_reason
    return data
