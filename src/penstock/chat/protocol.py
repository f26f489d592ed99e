"""Convert a conversation to the input of a run, and the result of a run to a message of the conversation.

Pure. The input of a run is the messages on the path to its answer. The answer is the output of the graph as text; if
the run failed or was stopped and has no output, it is the text that had been emitted by then.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Literal

from penstock.chat.message import MAX_CHARACTERS, ChatMessage
from penstock.chat.scope import CHAT_START_TYPES, services_for
from penstock.hosting.records import HostedEvent, RunRecord, RunStatus
from penstock.kernel.graph import GraphSpec
from penstock.money import known_usd
from penstock.nodes.chat_start import as_messages

State = Literal["writing", "complete", "partial", "failed", "halted"]

STATES: Mapping[RunStatus, State] = {
    "completed": "complete",
    "cancelled": "partial",
    "failed": "failed",
    "halted": "halted",
}
"""The state of an answer by the final status of its run; until the run ends, the state is "writing"."""

KIND = "chat"
"""The kind of origin of runs that answer in a chat."""

INPUT_TYPES = frozenset({"input"})
"""Where a chat enters a graph that has no chat-start."""

MAX_ERROR = 2_000
CUT = "\n[cut]"


def unfinished(path: Iterable[ChatMessage]) -> list[str]:
    """Return the ids of the answers on a path that are still being written, and so are empty."""
    return [message.id for message in path if message.data.get("state") == "writing"]


def history_of(path: Iterable[ChatMessage], skipped: Collection[str] = ()) -> list[dict[str, Any]]:
    """Return the messages on a path in the form that models receive; empty answers are left out.

    The ids in `skipped` are left out too: those answers were empty when the run was submitted and may have text by now.
    """
    messages: list[dict[str, Any]] = []
    for message in path:
        attached = message.data.get("attachments")
        if (message.content or attached) and message.id not in skipped:
            messages.append({"role": message.role, "content": message.content})
            if attached:
                messages[-1]["attachments"] = attached
    return messages


def replace_user_message(history: Sequence[Mapping[str, Any]], given: Any) -> list[dict[str, Any]]:
    """Return the history with its last user message replaced by `given`, and nothing after it.

    The attachments of that message stay. An object with `messages` replaces the whole history.
    """
    messages = [dict(one) for one in as_messages(given)]
    if isinstance(given, Mapping) and "messages" in given:
        return messages
    user_indices = [at for at, one in enumerate(history) if one["role"] == "user"]
    if not user_indices:
        return [*map(dict, history), *messages]
    return [*map(dict, history[: user_indices[-1]]), {**history[user_indices[-1]], **messages[0]}]


def newest_text(history: Sequence[Mapping[str, Any]]) -> str:
    """Return the content of the last user message; empty if there is none."""
    return next((one["content"] for one in reversed(history) if one["role"] == "user"), "")


def chat_services(graph: GraphSpec) -> dict[str, Any]:
    """Return the services for a chat run of `graph`; InvalidValue if the graph has no node where a chat can enter."""
    starts = [node.id for node in graph.nodes if node.type in CHAT_START_TYPES]
    return services_for(graph, starts or [node.id for node in graph.nodes if node.type in INPUT_TYPES])


def answer_text(output: Any) -> str:
    """Render the output of a graph as an answer: text as is, several texts as paragraphs, anything else as JSON."""
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
    """Return text that a message accepts: halves of surrogate pairs are replaced, and long text is truncated."""
    whole = text.encode("utf-8", "replace").decode()
    return whole if len(whole) <= most else whole[: most - len(CUT)] + CUT


def partial_text(events: Iterable[HostedEvent]) -> str:
    """Return the text emitted of an unfinished answer: the deltas of the last node to emit text, since its last start.

    A run that another worker takes over emits an unfinished answer from the beginning. If several agents inside the
    node emitted text, the outermost one counts.
    """
    texts: dict[str, dict[str, list[str]]] = {}
    is_stale = False
    for event in events:
        if event.type in ("run.started", "run.resumed"):
            is_stale = True  # keep the earlier text until the resumed run emits new text
        elif event.type == "text.delta" and event.data.get("text"):
            if is_stale:
                texts, is_stale = {}, False
            node = texts.pop(str(event.data.get("node_id")), {})
            node.setdefault(str(event.data.get("source")), []).append(str(event.data["text"]))
            texts[str(event.data.get("node_id"))] = node
    if not texts:
        return ""
    speakers = list(texts.values())[-1]
    outermost = min(speakers, key=lambda source: source.count("/"))
    return as_content("".join(speakers[outermost]))


def writing(run_id: str) -> dict[str, Any]:
    """Return the data of an answer that is being written."""
    return {"state": "writing", "run_id": run_id, "cost_usd": 0.0, "attachments": []}


def written(run: RunRecord) -> dict[str, Any]:
    """Return the data of the answer of a run that has ended."""
    cost_usd = known_usd(run.cost_nanos, run.unknown_costs)
    data: dict[str, Any] = {"state": STATES[run.status], "run_id": run.id, "cost_usd": cost_usd, "attachments": []}
    if run.unknown_costs:
        data["unknown_costs"] = run.unknown_costs
    if run.error and run.status != "completed":
        data["error"] = as_content(run.error, MAX_ERROR)
    if run.stop_reason and run.status != "completed":
        data["stop_reason"] = run.stop_reason
    return data
