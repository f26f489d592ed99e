"""An answer as a `chat.completion`, and as the chunks of one.

Data without a field in OpenAI's format is in the field `penstock`, which official clients keep and do not read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.server.openai.wire.answer import (
    ClientCalls,
    Ended,
    Idle,
    Piece,
    QuestionsChanged,
    Spent,
    TextAdded,
    ToolCalled,
    Withdrawn,
)

Json = dict[str, Any]
PLACE = "\u2063text\u2063"
"""Placeholder for the text of a chunk; no data from a client follows it in a chunk."""

WAITING: Json = {"status": "waiting"}
"""Status of a run that waits for results of the client's tools, or for a person."""


@dataclass(slots=True)
class Completion:
    """One completion in progress: its run, model and creation time."""

    run_id: str
    model: str
    created: int
    """Unix time in seconds, as in OpenAI's API."""
    ignored: Sequence[str] = ()
    include_usage: bool = False
    metadata: Mapping[str, str] | None = None
    """Metadata of the request; a completion that is not streamed repeats it."""
    rounds: int = 0
    """How often the client had returned results of its tools before."""
    _has_text: bool = field(default=False, init=False)
    _around: tuple[bytes, bytes] | None = field(default=None, init=False)
    """The encoded bytes before and after the text in each chunk that has one."""

    @property
    def id(self) -> str:
        """The run id in the format of OpenAI's ids."""
        return f"chatcmpl-{numbered(self.run_id, self.rounds)}"

    def opening(self) -> Json:
        """Return the first chunk, which has the role."""
        return self._chunk({"role": "assistant", "content": "", "refusal": None}, penstock=self._facts())

    def framed_text(self, piece: TextAdded, frame: Callable[[Json], bytes], encode: Callable[[str], bytes]) -> bytes:
        """Return the frame of a piece of text, equal to `frame` of its chunk; all but the text is encoded only once."""
        if self._around is None:
            before, _, after = frame(self._chunk({"content": PLACE})).rpartition(encode(PLACE))
            self._around = before, after
        return self._around[0] + encode(self._separated(piece)) + self._around[1]

    def chunks(self, piece: Piece) -> Iterator[Json]:
        """Yield the piece as chunks; for an end that is a failure, the caller sends an error instead."""
        if isinstance(piece, TextAdded):
            yield self._chunk({"content": self._separated(piece)})
        elif isinstance(piece, ToolCalled):
            call = {"id": piece.id, "name": piece.name, "arguments": piece.arguments}
            yield self._chunk({}, penstock={"run_id": self.run_id, "tool_call": call})
        elif isinstance(piece, Withdrawn):
            yield self._chunk({}, penstock={"run_id": self.run_id, "withdrawn": piece.items})
        elif isinstance(piece, QuestionsChanged):
            yield self._chunk({}, penstock={"run_id": self.run_id, "approvals": questions_json(piece)})
        elif isinstance(piece, ClientCalls):
            for at, requested in enumerate(piece.calls):
                function = {"name": requested.name, "arguments": ""}
                begun = {"index": at, "id": requested.id, "type": "function", "function": function}
                yield self._chunk({"tool_calls": [begun]})
                yield self._chunk({"tool_calls": [{"index": at, "function": {"arguments": requested.arguments}}]})
            yield self._chunk({}, "tool_calls", self._facts() | WAITING)
            if self.include_usage:
                yield {**self._chunk({}), "choices": [], "usage": usage(piece.spent)}
        elif not isinstance(piece, Idle):
            yield self._chunk({}, finish_reason(piece), self._facts(piece))
            if self.include_usage:
                yield {**self._chunk({}), "choices": [], "usage": usage(piece)}

    def whole(self, text: str, end: Ended | ClientCalls | QuestionsChanged) -> Json:
        """Return the whole completion as one object; `text` is the text emitted up to `end`.

        A run that waits for a person is not an error. Its completion has the questions, no answer and no usage yet.
        """
        message: Json = {"role": "assistant", "content": text, "refusal": None}
        finish, about = "stop", self._facts()
        if isinstance(end, Ended):
            message["content"] = end.text if end.status == "completed" else text
            finish, about = finish_reason(end), self._facts(end)
        elif isinstance(end, ClientCalls):
            finish, about = "tool_calls", about | WAITING
            message |= {"content": text or None, "tool_calls": [_call_json(call) for call in end.calls]}
        else:
            about |= {**WAITING, "approvals": questions_json(end)}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": finish}
        return {
            **self._head("chat.completion"),
            "choices": [choice],
            "usage": usage(Spent() if isinstance(end, QuestionsChanged) else _spent(end)),
            "metadata": None if self.metadata is None else dict(self.metadata),
            "penstock": about,
        }

    def _separated(self, piece: TextAdded) -> str:
        text = f"\n\n{piece.text}" if piece.begins and self._has_text else piece.text
        self._has_text = True
        return text

    def _head(self, kind: str) -> Json:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "system_fingerprint": None}

    def _chunk(self, delta: Json, finish: str | None = None, penstock: Json | None = None) -> Json:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
        chunk = {**self._head("chat.completion.chunk"), "choices": [choice]}
        if self.include_usage:
            chunk["usage"] = None
        if penstock is not None:
            chunk["penstock"] = penstock
        return chunk

    def _facts(self, ended: Ended | None = None) -> Json:
        return facts(self.run_id, self.ignored, ended)


def numbered(run_id: str, rounds: int) -> str:
    """Return the run id for the ids of answers: a run that the client's tools interrupt has several answers."""
    return f"{run_id}~{rounds}" if rounds else run_id


def facts(run_id: str, ignored: Sequence[str], ended: Ended | None) -> Json:
    """Return the content of the field `penstock` for a run."""
    known: Json = {"run_id": run_id, "ignored": list(ignored)}
    if ended is not None:
        stop_reason = ended.reason if ended.status != "completed" else None
        known |= {"status": ended.status, "cost_usd": ended.cost_usd, "stop_reason": stop_reason}
        if ended.unknown_costs:
            known["unknown_costs"] = ended.unknown_costs
        if ended.unresolved_usd:
            known["unresolved_usd"] = ended.unresolved_usd
        if ended.message and ended.status != "completed":
            known["message"] = ended.message
    return known


def questions_json(waiting: QuestionsChanged) -> list[Json]:
    """Return the questions that a run waits for, with the routes to answer them."""
    return [
        {
            "id": question.id,
            "node_id": question.node_id,
            "question": question.text,
            "value": question.value,
            "answer": [f"POST /api/approvals/{question.id}/{verdict}" for verdict in ("approve", "edit", "reject")],
        }
        for question in waiting.questions
    ]


def run_facts(run_id: str, ended: Ended) -> Json:
    """Return what an error reports about a run without an answer: its outcome and its usage."""
    known = facts(run_id, (), ended)
    del known["ignored"]
    known.pop("message", None)  # the error has its own
    return {**known, "usage": usage(ended)}


def finish_reason(ended: Ended) -> str:
    """Return `stop`, or why the answer is truncated: `length` for every run that did not complete."""
    return ended.truncated_by or "stop" if ended.status == "completed" else "length"


def usage(spent: Ended | Spent) -> Json:
    """Return the tokens of all model calls for this request, and their cost in US dollars."""
    tokens_in, tokens_out = tokens_of(spent)
    return {
        "prompt_tokens": tokens_in,
        "completion_tokens": tokens_out,
        "total_tokens": tokens_in + tokens_out,
        **spent.cost,
    }


def tokens_of(spent: Ended | Spent) -> tuple[int, int]:
    """Return the input and output tokens of a request: the tokens of its run, less the tokens of earlier requests."""
    if isinstance(spent, Spent):
        return spent.tokens_in, spent.tokens_out
    return spent.tokens_in - spent.before.tokens_in, spent.tokens_out - spent.before.tokens_out


def _spent(end: Ended | ClientCalls) -> Ended | Spent:
    return end.spent if isinstance(end, ClientCalls) else end


def _call_json(call: ToolCalled) -> Json:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
