"""An answer as a `chat.completion`, and as the chunks of one.

Data without a field in OpenAI's format is in the field `penstock`, which official clients keep and do not read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.server.openai.wire.answer import (
    AnswerBuilder,
    Ended,
    Piece,
    QuestionsChanged,
    TextAdded,
    ToolCalled,
    Withdrawn,
)

Json = dict[str, Any]


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
    _has_text: bool = field(default=False, init=False)

    @property
    def id(self) -> str:
        """The run id in the format of OpenAI's ids."""
        return f"chatcmpl-{self.run_id}"

    def opening(self) -> Json:
        """Return the first chunk, which has the role."""
        return self._chunk({"role": "assistant", "content": "", "refusal": None}, penstock=self._facts())

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
        else:
            yield self._chunk({}, finish_reason(piece), self._facts(piece))
            if self.include_usage:
                yield {**self._chunk({}), "choices": [], "usage": usage(piece)}

    def whole(self, answer: AnswerBuilder) -> Json:
        """Return the whole completion as one object."""
        assert answer.ended is not None
        ended = answer.ended
        content = ended.text if ended.status == "completed" else answer.text
        message = {"role": "assistant", "content": content, "refusal": None}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": finish_reason(ended)}
        return {
            **self._head("chat.completion"),
            "choices": [choice],
            "usage": usage(ended),
            "metadata": None if self.metadata is None else dict(self.metadata),
            "penstock": self._facts(ended),
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


def usage(ended: Ended) -> Json:
    """Return the tokens of all model calls of the run, and their cost in US dollars."""
    return {
        "prompt_tokens": ended.tokens_in,
        "completion_tokens": ended.tokens_out,
        "total_tokens": ended.tokens_in + ended.tokens_out,
        **ended.cost,
    }
