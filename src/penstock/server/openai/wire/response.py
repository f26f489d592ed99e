"""An answer as a `response` object, and as the events of its stream.

Each statement is a message item; each tool call of the answering agent is a `function_call` item, already completed,
between the statements around it. One fold produces everything, so the events of a stream, the response at its end and
the response retrieved later agree. A stream cannot remove an item: a withdrawn item is closed there as incomplete, and
the response does not contain it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from penstock.server.openai.wire.answer import (
    ClientCalls,
    Ended,
    Idle,
    Piece,
    QuestionsChanged,
    TextAdded,
    ToolCalled,
    Withdrawn,
)
from penstock.server.openai.wire.chunks import WAITING, facts, numbered, questions_json, tokens_of

Json = dict[str, Any]
Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]

STATUSES: Mapping[str, Status] = {
    "queued": "queued",
    "running": "in_progress",
    "waiting": "in_progress",
    "parked": "in_progress",
    "completed": "completed",
    "halted": "incomplete",
    "failed": "failed",
    "cancelled": "cancelled",
}
"""OpenAI's response status for each run status."""
EMPTY: tuple[Any, ...] = ({}, [], ())
MAX_STORED = 20_000
"""Maximum size of the stored request fields, in characters of JSON."""


@dataclass(frozen=True, slots=True)
class EchoedRequest:
    """Fields of the request that the response repeats."""

    model: str
    instructions: str | None = None
    previous_response_id: str | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    background: bool = False
    temperature: float | None = None
    top_p: float | None = None
    max_output_tokens: int | None = None
    user: str | None = None
    ignored: Sequence[str] = ()
    tools: Sequence[Mapping[str, Any]] = ()
    tool_choice: Any = "auto"
    parallel_tool_calls: bool = True
    format: Mapping[str, Any] | None = None
    """The output format; None for text."""

    @classmethod
    def restore(cls, stored: object, model: str) -> EchoedRequest:
        """Restore the stored fields; for a run that was not started over /v1/responses, only `model` is set."""
        given = stored if isinstance(stored, Mapping) else {}
        return cls(
            **{
                "model": model,
                **{attribute.name: given[attribute.name] for attribute in fields(cls) if attribute.name in given},
            }
        )

    def to_store(self) -> Json:
        """Return the fields to store with the run, for later retrieval of the response: all, unless they are too long.

        Lists of runs load these fields too, so the size is limited; fields of unbounded length are dropped first.
        """
        given = {attribute.name: getattr(self, attribute.name) for attribute in fields(self)}
        facts = {name: value for name, value in given.items() if value is not None and value not in EMPTY}
        for name in ("instructions", "tools", "format", "ignored", "user"):
            if len(json.dumps(facts, ensure_ascii=False)) > MAX_STORED:
                facts.pop(name, None)
        return facts


def response_id(run_id: str) -> str:
    """Return the run id in the format of OpenAI's ids."""
    return f"resp_{run_id}"


def run_id_of(response_id: str) -> tuple[str, int] | None:
    """Return the run id of a response id, and how often the client had returned results; None for a wrong format."""
    prefix, _, rest = response_id.partition("_")
    run_id, tilde, rounds = rest.partition("~")
    is_number = rounds.isascii() and rounds.isdigit() and len(rounds) < 6
    if prefix != "resp" or not run_id or (tilde and not is_number):
        return None
    return run_id, int(rounds or 0)


@dataclass(slots=True)
class ResponseBuilder:
    """One response in progress: its content so far, and the number of the next event."""

    run_id: str
    created_at: int
    echoed: EchoedRequest
    status: Status = "in_progress"
    output: list[Json] = field(default_factory=list)
    """All emitted items, including withdrawn ones, at their index in the stream."""
    ended: Ended | None = None
    waiting: QuestionsChanged | None = None
    """Questions that the run waits for."""
    calls: ClientCalls | None = None
    """Calls of the client's tools that are the answer."""
    rounds: int = 0
    """How often the client had returned results of its tools before."""
    _sequence: int = 0
    _is_open: bool = False
    """Whether the last item is a message in progress."""
    _current: list[int] = field(default_factory=list)
    """Indexes of the items that were not withdrawn; the response contains these."""
    _pieces: list[str] = field(default_factory=list)
    """Text of the message in progress, in pieces; joined when the message is done."""

    @property
    def emitted(self) -> int:
        """Number of events emitted so far."""
        return self._sequence

    def opening(self) -> Iterator[Json]:
        """Yield the first two events; they are the same each time, so that a stream can be resumed."""
        yield self._event("response.created", response=self.to_dict())
        yield self._event("response.in_progress", response=self.to_dict())

    def broken(self, code: str, message: str) -> Json:
        """Return the error event for a stream that cannot continue, regardless of the run's outcome.

        It has the number of the preceding event, so a client that resumes after that number misses nothing.
        """
        about = {"run_id": self.run_id}
        error: Json = {"type": "error", "sequence_number": self._sequence - 1, "code": code, "message": message}
        return {**error, "param": None, "penstock": about}

    def events(self, piece: Piece) -> Iterator[Json]:
        """Yield the piece as stream events."""
        if isinstance(piece, TextAdded):
            yield from self._add_text(piece)
        elif isinstance(piece, ToolCalled):
            yield from self._close("completed")
            # A client that offers tools would look for this one among them.
            if not self.echoed.tools:
                yield from self._add_call(piece)
        elif isinstance(piece, Withdrawn):
            yield from self._close("incomplete")
            del self._current[len(self._current) - piece.items :]
        elif isinstance(piece, ClientCalls):
            yield from self._close("completed")
            for call in piece.calls:
                yield from self._add_call(call)
            self.calls, self.status = piece, "completed"
            yield self._event("response.completed", response=self.to_dict())
        elif isinstance(piece, Idle):
            return
        elif isinstance(piece, QuestionsChanged):
            self.waiting = piece
            yield self._event("response.in_progress", response=self.to_dict())
        else:
            yield from self._finish(piece)

    def to_dict(self) -> Json:
        """Return the response in its current state."""
        echoed = self.echoed
        return {
            "id": response_id(numbered(self.run_id, self.rounds)),
            "object": "response",
            "created_at": self.created_at,
            "completed_at": self.ended.at_ms // 1000 if self.ended and self.status == "completed" else None,
            "status": self.status,
            "background": echoed.background,
            "error": self._error(),
            "incomplete_details": self._why_incomplete(),
            "instructions": echoed.instructions,
            "max_output_tokens": echoed.max_output_tokens,
            "metadata": dict(echoed.metadata),
            "model": echoed.model,
            "output": self._items(),
            "parallel_tool_calls": echoed.parallel_tool_calls,
            "previous_response_id": echoed.previous_response_id,
            "store": True,
            "temperature": echoed.temperature,
            "text": {"format": echoed.format or {"type": "text"}},
            "tool_choice": echoed.tool_choice,
            "tools": [*echoed.tools],
            "top_p": echoed.top_p,
            "truncation": "disabled",
            "usage": self._usage(),
            "user": echoed.user,
            "penstock": self._facts(),
        }

    def _facts(self) -> Json:
        known = facts(self.run_id, self.echoed.ignored, self.ended)
        if self.calls is not None:
            known |= WAITING
        if self.waiting is not None and self.ended is None:
            known["approvals"] = questions_json(self.waiting)
            if self.waiting.questions:
                known |= WAITING
        return known

    def _items(self) -> list[Json]:
        items = [dict(self.output[index]) for index in self._current]
        if self._is_open:
            items[-1]["content"] = [_part("".join(self._pieces))]
        return items

    def _add_text(self, piece: TextAdded) -> Iterator[Json]:
        if piece.begins or not self._is_open:
            yield from self._close("completed")
            yield from self._open()
        self._pieces.append(piece.text)
        yield self._in_part("response.output_text.delta", delta=piece.text, logprobs=[])

    def _open(self) -> Iterator[Json]:
        item: Json = {"type": "message", "id": self._item_id("msg"), "status": "in_progress", "role": "assistant"}
        self._begin({**item, "content": []})
        self._is_open = True
        yield self._of_item("response.output_item.added")
        yield self._in_part("response.content_part.added", part=_part(""))

    def _begin(self, item: Json) -> None:
        self._current.append(len(self.output))
        self.output.append(item)

    def _close(self, status: str, text: str = "") -> Iterator[Json]:
        """Close the message in progress with `text`, or with its emitted text if `text` is empty."""
        if not self._is_open:
            return
        text = text or "".join(self._pieces)
        self._pieces.clear()
        self._is_open = False
        yield self._in_part("response.output_text.done", text=text, logprobs=[])
        yield self._in_part("response.content_part.done", part=_part(text))
        self.output[-1] = {**self.output[-1], "status": status, "content": [_part(text)]}
        yield self._of_item("response.output_item.done")

    def _add_call(self, call: ToolCalled) -> Iterator[Json]:
        item: Json = {"type": "function_call", "id": self._item_id("fc"), "call_id": call.id, "name": call.name}
        self._begin({**item, "arguments": "", "status": "in_progress"})
        yield self._of_item("response.output_item.added")
        yield self._on_item("response.function_call_arguments.delta", delta=call.arguments)
        yield self._on_item("response.function_call_arguments.done", name=call.name, arguments=call.arguments)
        self.output[-1] = {**item, "arguments": call.arguments, "status": "completed"}
        yield self._of_item("response.output_item.done")

    def _finish(self, ended: Ended) -> Iterator[Json]:
        self.ended = ended
        if ended.status == "parked":  # a client can resume the stream from here later
            yield self.broken("parked", PARKED)
            return
        # The run's output is authoritative: an abandoned attempt inside the run may have emitted more text.
        self.status = _final(ended)
        yield from self._close("completed" if self.status == "completed" else "incomplete", ended.text)
        status = "failed" if self.status == "cancelled" else self.status  # streams have no event for cancelled
        yield self._event(f"response.{status}", response=self.to_dict())

    def _error(self) -> Json | None:
        ended = self.ended
        if ended is None or self.status != "failed":
            return None
        why = ": ".join(part for part in (ended.reason, ended.message) if part)
        return {"code": "server_error", "message": why or ended.status}

    def _why_incomplete(self) -> Json | None:
        """Return one of OpenAI's two reasons; `penstock.stop_reason` has the limit of the run that was reached."""
        if self.status != "incomplete":
            return None
        is_filtered = self.ended is not None and self.ended.truncated_by == "content_filter"
        return {"reason": "content_filter" if is_filtered else "max_output_tokens"}

    def _usage(self) -> Json | None:
        spent = self.ended if self.calls is None else self.calls.spent
        if spent is None or (isinstance(spent, Ended) and spent.status == "parked"):
            return None
        tokens_in, tokens_out = tokens_of(spent)
        return {
            "input_tokens": tokens_in,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": tokens_out,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": tokens_in + tokens_out,
            **spent.cost,
        }

    def _item_id(self, kind: str) -> str:
        return f"{kind}_{numbered(self.run_id, self.rounds)}_{len(self.output)}"

    def _event(self, kind: str, **fields: Any) -> Json:
        number = self._sequence
        self._sequence += 1
        return {"type": kind, "sequence_number": number, **fields}

    def _of_item(self, kind: str) -> Json:
        return self._event(kind, output_index=len(self.output) - 1, item=dict(self.output[-1]))

    def _on_item(self, kind: str, **fields: Any) -> Json:
        return self._event(kind, output_index=len(self.output) - 1, item_id=self.output[-1]["id"], **fields)

    def _in_part(self, kind: str, **fields: Any) -> Json:
        return self._on_item(kind, content_index=0, **fields)


PARKED = "the run was parked before it ended and continues later; GET the response to see its outcome"


def _final(ended: Ended) -> Status:
    """Return the final status: a run halted by anything but a limit is `failed`, a truncated answer `incomplete`."""
    if ended.truncated_by is not None and ended.status == "completed":
        return "incomplete"
    if ended.status == "halted" and not ended.is_limit:
        return "failed"
    return STATUSES[ended.status]


def _part(text: str) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
