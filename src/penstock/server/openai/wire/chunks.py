"""An answer as a `chat.completion`, and as the chunks of one.

What OpenAI's shape has no place for stands in the field `penstock`, which official clients keep and do not read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.server.openai.wire.answer import Answer, Ended, Piece, Said, Used, Waits, Withdrawn

Json = dict[str, Any]


@dataclass(slots=True)
class Completion:
    """One completion under way: whose run, of which model, since when."""

    run_id: str
    model: str
    created: int
    """In seconds, as OpenAI counts."""
    ignored: Sequence[str] = ()
    include_usage: bool = False
    metadata: Mapping[str, str] | None = None
    """What the request said of itself; a whole completion repeats it."""
    _has_text: bool = field(default=False, init=False)

    @property
    def id(self) -> str:
        """The run's id, as OpenAI's ids look."""
        return f"chatcmpl-{self.run_id}"

    def opening(self) -> Json:
        """The first chunk: who speaks."""
        return self._chunk({"role": "assistant", "content": "", "refusal": None}, penstock=self._facts())

    def chunks(self, piece: Piece) -> Iterator[Json]:
        """The piece as chunks; an end that was a failure is told as an error instead, by whoever asks."""
        if isinstance(piece, Said):
            yield self._chunk({"content": self._apart(piece)})
        elif isinstance(piece, Used):
            used = {"id": piece.id, "name": piece.name, "arguments": piece.arguments}
            yield self._chunk({}, penstock={"run_id": self.run_id, "tool_call": used})
        elif isinstance(piece, Withdrawn):
            yield self._chunk({}, penstock={"run_id": self.run_id, "withdrawn": piece.items})
        elif isinstance(piece, Waits):
            yield self._chunk({}, penstock={"run_id": self.run_id, "approvals": asked_in(piece)})
        else:
            yield self._chunk({}, finish_reason(piece), self._facts(piece))
            if self.include_usage:
                yield {**self._chunk({}), "choices": [], "usage": usage(piece)}

    def whole(self, answer: Answer) -> Json:
        """The completion in one."""
        assert answer.ended is not None
        ended = answer.ended
        content = ended.text if ended.status == "completed" else answer.said
        message = {"role": "assistant", "content": content, "refusal": None}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": finish_reason(ended)}
        return {
            **self._head("chat.completion"),
            "choices": [choice],
            "usage": usage(ended),
            "metadata": None if self.metadata is None else dict(self.metadata),
            "penstock": self._facts(ended),
        }

    def _apart(self, piece: Said) -> str:
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
    """What the field `penstock` says of a run."""
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


def asked_in(waits: Waits) -> list[Json]:
    """What a run asks people, and how to answer it."""
    return [
        {
            "id": one.id,
            "node_id": one.node_id,
            "question": one.text,
            "value": one.value,
            "answer": [f"POST /api/approvals/{one.id}/{verdict}" for verdict in ("approve", "edit", "reject")],
        }
        for one in waits.questions
    ]


def spent(run_id: str, ended: Ended) -> Json:
    """What an error says of the run that came to no answer: what became of it, and what it has used."""
    known = facts(run_id, (), ended)
    del known["ignored"]
    known.pop("message", None)  # the error has it
    return {**known, "usage": usage(ended)}


def finish_reason(ended: Ended) -> str:
    """`stop`, or what cut the answer short: of a run that did not complete, the `length` that it was given."""
    return ended.cut or "stop" if ended.status == "completed" else "length"


def usage(ended: Ended) -> Json:
    """The tokens of all model calls of the run, and what they cost in US dollars."""
    return {
        "prompt_tokens": ended.tokens_in,
        "completion_tokens": ended.tokens_out,
        "total_tokens": ended.tokens_in + ended.tokens_out,
        **ended.cost,
    }
